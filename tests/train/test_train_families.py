"""Every family trains from its configuration and from transformers' weights, and computes the same when compiled."""

import shutil
import warnings

import pytest
import torch
from small_runs import small_config
from torch import nn

from chimera.cli.training import run_local
from chimera.errors import CheckpointError, ConfigError
from chimera.models.huggingface import HuggingFaceWeights, finish_huggingface, write_huggingface
from chimera.runtime.pipeline import Pipeline
from chimera.schedules import build_schedule
from chimera.tensor.parallel import TensorParallel
from chimera.tensor.sharding import WHOLE
from chimera.tensor.vocabulary import Vocabulary
from chimera.train.compiling import compile_blocks
from chimera.train.config_file import make_config
from chimera.train.families import FAMILIES, family_of, layers_of
from chimera.train.layout import layout_of
from chimera.train.metrics import read_rows
from chimera.train.weights import export_weights, import_weights

OPTIONS = {
    "bert": {},
    "gpt": {"model__vocab_size": 120},
    "llama": {"model__num_key_value_heads": 1, "model__intermediate_size": 24},
    "t5": {"model__vocab_size": 256},
    "ict": {"data__query_length": 8, "data__sequence_length": 40, "model__max_positions": 40},
}
TERMS = {"bert": {"mlm", "nsp"}, "gpt": {"lm"}, "llama": {"lm"}, "t5": {"lm"}, "ict": {"retrieval"}}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give one folder to all runs of this module, so that the corpus is tokenised once."""
    return tmp_path_factory.mktemp("families")


def config_of(folder, family, **options):
    return small_config(folder, model__family=family, **OPTIONS[family], **options)


@pytest.mark.parametrize("family", ["gpt", "llama", "t5", "ict"])
def test_every_family_trains(folder, family):
    """Two ranks run two steps and an evaluation; rows have the family's terms, which add up to the loss."""
    out = folder / family
    result = run_local(config_of(folder, family, train__steps=2, train__out=out))
    rows = read_rows(out / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert {name.removesuffix("_loss") for name in row if name.endswith("_loss")} == TERMS[family]
        assert row["loss"] == pytest.approx(sum(row[f"{term}_loss"] for term in TERMS[family]))
        assert row["grad_norm"] > 0
    assert set(result.evaluations[-1].terms) == TERMS[family]
    assert (result.evaluations[-1].answers is not None) == (family == "ict")


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_costs_and_losses_fit_one_another(folder, family):
    """There is a cost for each layer, samples have what layers and loss ask for, and the cut gives every stage some."""
    config = config_of(folder, family)
    row = family_of(config.model)
    with torch.device("meta"):
        layers = layers_of(config.model)
    costs = row.costs(config.model, config.data)
    assert len(costs) == len(layers)
    assert min(costs) > 0
    assert sorted(set(layout_of(config).layer_to_stage)) == [0, 1]
    loss = row.loss(Vocabulary(config.model.vocab_size))
    assert set(loss.terms) == TERMS[family]


def test_an_option_of_another_family_is_refused(folder):
    """The families that have it are named, not merely that it is unknown."""
    with pytest.raises(ConfigError, match=r"model\.rope_theta is an option of family llama, not of gpt"):
        small_config(folder, model__family="gpt", model__rope_theta=10.0)
    with pytest.raises(ConfigError, match=r"samples = 't5' does not fit \[model\] family = 'gpt'.*'gpt'"):
        small_config(folder, model__family="gpt", data__samples="t5")
    with pytest.raises(ConfigError, match=r'model\.family = \'opt\'; needed: "bert" or "gpt"'):
        make_config({"model": {"family": "opt"}})


# Weights from and to transformers' files


def exported(group, folder, config, *, t):
    """Draw weights on all ranks of a pipeline and write them; return this rank's own, whole ones."""
    pipe = pipeline(group, config, t=t)
    export_weights(pipe, folder, config.model)
    pipe.close()


def imported(group, folder, config, *, t, shard):
    """Read the files into another layout, and write what came of it."""
    pipe = pipeline(group, config, t=t, seed=99, shard=shard)
    import_weights(pipe, folder, config.model)
    export_weights(pipe, folder / "again", config.model)
    pipe.close()


def pipeline(group, config, *, t, seed=5, shard=False):
    parallel = TensorParallel.join(group, t, sequence=t > 1, timeout_s=30.0)
    ranks = group.size() // t
    with torch.device("meta"):
        layers = layers_of(config.model, parallel)
    loss = family_of(config.model).loss(Vocabulary(config.model.vocab_size, parallel))
    schedule = build_schedule("chimera", ranks=ranks, microbatches=ranks)
    return Pipeline(layers, schedule, loss, group, tensor=parallel, seed=seed, shard_optimizer=shard, timeout_s=30.0)


@pytest.mark.parametrize("family", ["bert", "gpt", "llama", "t5"])
def test_weights_go_to_files_and_into_another_layout(ranks, folder, tmp_path, family):
    """Two stages by two tensor-parallel ranks write files that four stages with shards read, bit by bit."""
    options = {"model__num_key_value_heads": 2} if family == "llama" else {}
    config = small_config(folder, model__family=family, **OPTIONS[family] | options)
    ranks.run(4, exported, tmp_path, config, t=2)
    ranks.run(4, imported, tmp_path, config, t=1, shard=True)
    first, second = (HuggingFaceWeights(path, config.model) for path in (tmp_path, tmp_path / "again"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.device("meta"):
        state = nn.Sequential(*layers_of(config.model)).state_dict()
    for name, tensor in state.items():
        assert torch.equal(first.part(name, WHOLE, tensor.shape), second.part(name, WHOLE, tensor.shape)), name


def test_a_run_begins_from_weights_that_are_given(folder, tmp_path):
    """Before the first step the held-out loss is that of the files; weights of another size are refused."""
    config = config_of(folder, "gpt", train__steps=1, train__out=tmp_path / "run", train__evaluation_samples=8)
    layers = nn.Sequential(*layers_of(config.model))
    with torch.no_grad():
        layers[0].word.weight.zero_()
    weights = {name: tensor.detach() for name, tensor in layers.named_parameters()}
    write_huggingface(tmp_path / "zero", weights, config.model)
    finish_huggingface(tmp_path / "zero", config.model)
    options = {"train__steps": 1, "train__out": tmp_path / "run", "train__weights": tmp_path / "zero"}
    result = run_local(config_of(folder, "gpt", **options))
    # Words without an embedding are all as likely as one another.
    assert result.evaluations[0].terms["lm"] == pytest.approx(torch.tensor(120.0).log().item(), abs=1e-5)
    with pytest.raises(CheckpointError, match="weights of another size"):
        run_local(config_of(folder, "gpt", **options | {"train__out": tmp_path / "other", "model__hidden_size": 32}))


def test_a_bi_encoder_has_no_files_at_transformers(folder, tmp_path):
    """It is refused by name rather than written under made-up names."""
    with pytest.raises(ConfigError, match="no model of the kind IctConfig"):
        HuggingFaceWeights({}, config_of(folder, "ict").model)


# Compiled blocks


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.long if f == "t5" else ()) for f in FAMILIES])
def test_compiled_blocks_compute_the_same(folder, family):
    """Traced forward and backward with dropout give the plain run's loss and gradients, in a split schedule too."""
    config = config_of(folder, family)
    found = []
    for compiled in (False, True):
        with torch.device("meta"):
            layers = layers_of(config.model)
        if compiled:
            assert compile_blocks(layers, backend="aot_eager") >= 2
        with warnings.catch_warnings():
            if compiled:  # the compiler reads much that warns
                warnings.simplefilter("ignore")
            found.append(one_step(layers, config))
    (plain_loss, plain), (loss, gradients) = found
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    for name, gradient in plain.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def one_step(layers, config):
    schedule = build_schedule("zb-h1", ranks=1, microbatches=2)
    loss = family_of(config.model).loss(Vocabulary(config.model.vocab_size))
    pipe = Pipeline(layers, schedule, loss, seed=3)
    batch = batch_of(config)
    value = pipe.step(batch, batch).item()
    gradients = {name: parameter.grad.clone() for name, parameter in pipe.named_parameters()}
    pipe.close()
    return value, gradients


def batch_of(config):
    """Return two micro-batches with every field that any family asks for."""
    generator = torch.Generator().manual_seed(1)

    def words():
        return torch.randint(5, 100, (2, 8), generator=generator)

    fields = ("input_ids", "decoder_input_ids", "query_ids", "block_ids", "labels", "mlm_labels")
    one = torch.ones(2, 8, dtype=torch.long)
    masks = ("attention_mask", "query_attention_mask", "block_attention_mask", "token_type_ids")
    return [
        {name: words() for name in fields} | dict.fromkeys(masks, one) | {"nsp_labels": torch.tensor([0, 1])}
        for _ in range(2)
    ]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_run_equals_a_plain_one(folder, tmp_path, family):
    """train.compile changes no figure of a run beyond rounding."""
    losses = []
    for compiled in ("false", "true"):
        out = tmp_path / compiled
        run_local(
            config_of(folder, family, train__steps=3, train__out=out, train__compile=compiled, runtime__timeout_s=300)
        )
        losses.append([row["loss"] for row in read_rows(out / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
