"""The configuration: files, overrides, defaults that follow from others, and what is refused."""

import tomllib
from pathlib import Path

import pytest
import torch
from small_runs import small_config, small_document

from chimera.errors import ConfigError, UsageError
from chimera.ir.checks import check
from chimera.models import bert_layers, count_parameters
from chimera.passes.lower import lower
from chimera.plan.layout_string import layout_of_cut
from chimera.train.config_file import SECTIONS, load_config, make_config, to_toml
from chimera.train.families import layers_of
from chimera.train.layer_costs import bert_layer_costs
from chimera.train.layout import layout_of, predicted_bubble

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def meta_layers(config):
    with torch.device("meta"):
        return layers_of(config.model)


def without(document, section, key):
    """Return the sections without one key."""
    return {name: {k: v for k, v in table.items() if (name, k) != (section, key)} for name, table in document.items()}


def proved(paths):
    """Mark those whose proof takes long: with some 60,000 computations a step."""
    large = {"megatron-529.6b", "megatron-1008b"}
    return [pytest.param(path, marks=pytest.mark.long if path.stem in large else (), id=path.stem) for path in paths]


@pytest.mark.parametrize("path", proved(CONFIGS))
def test_every_shipped_configuration_runs(path):
    """Each file in configs/ loads, its schedule is proved as it will run, and every stage gets a layer."""
    config = load_config(path)
    layout = layout_of(config)
    check(lower(layout.schedule, reduce=config.schedule.reduce))
    assert layout.schedule.num_ranks == config.parallel.pipeline
    assert set(layout.layer_to_stage) == set(range(layout.schedule.num_stages))
    assert len(layout.layer_to_stage) == len(meta_layers(config))
    assert config.train.out == f"runs/{path.stem}"
    assert config.learning_rate.total_steps == config.train.steps


def test_bert_48_is_the_papers():
    """configs/bert-48.toml has the parameter total, the workers and the global batch of the Chimera paper."""
    config = load_config(next(path for path in CONFIGS if path.stem == "bert-48"))
    with torch.device("meta"):
        layers = bert_layers(config.model)
    assert count_parameters(layers) == 669_790_012
    assert config.world_size == 32
    assert (config.parallel.data, config.parallel.pipeline, config.train.microbatch_size) == (8, 4, 8)
    assert layout_of(config).global_batch == 512


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_toml_reads_back(path):
    """The configuration as run is written with every option, and reads back as the same value."""
    config = load_config(path)
    assert make_config(tomllib.loads(to_toml(config))) == config


def test_no_value_is_written_as_none(tmp_path):
    """An option without a value, whose default is one, survives the file; strange text does too."""
    config = small_config(tmp_path, optimizer__clip_norm="none", train__out='a "b"\\\n\x07é')
    assert config.optimizer.clip_norm is None
    assert make_config(tomllib.loads(to_toml(config))) == config


def test_overrides_are_typed_by_their_option(tmp_path):
    """Text becomes the option's type: number, truth value, choice, list, and text even if it looks like a number."""
    config = small_config(
        tmp_path,
        train__steps="1_000",
        optimizer__learning_rate="2e-3",
        optimizer__betas="[0.9, 0.95]",
        schedule__recompute="full",
        train__dtype="bf16",
        model__dropout="0",
        data__corpus="2024",
        schedule__microbatches="0x8",
    )
    assert config.train.steps == 1000
    assert config.optimizer.learning_rate == 0.002
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.schedule.recompute == "full"
    assert config.train.dtype == "bf16"
    assert config.model.dropout == 0.0
    assert config.data.corpus == "2024"
    assert config.schedule.microbatches == 8


def test_hyphens_stand_for_underscores(tmp_path):
    """Overrides may be written as the command line writes them."""
    config = make_config(small_document(tmp_path), {"learning-rate.total-steps": "7", "runtime.timeout-s": "1.5"})
    assert config.learning_rate.total_steps == 7
    assert config.runtime.timeout_s == 1.5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.stpes", "3", r"--train.stpes is unknown \(did you mean 'steps'"),
        ("trian.steps", "3", r"--trian.steps: unknown section 'trian' \(did you mean 'train'"),
        ("steps", "3", r"--steps: unknown section 'steps'; needed: --section.key"),
        ("train.hidden_size", "3", r"--train.hidden_size is unknown \(it belongs to \[model\]\)"),
        ("train.steps", "3.5", r"--train.steps = 3.5; needed: a whole number"),
        ("train.steps", "true", r"--train.steps = True; needed: a whole number"),
        ("train.steps", "many", r"--train.steps = 'many'; needed: a whole number"),
        ("train.steps", "1\n[x]", r"--train.steps = '1\\n\[x\]'; needed: a whole number"),
        ("train.steps", "none", r"--train.steps = 'none'; needed: a whole number"),
        ("optimizer.clip_norm", "no", r"--optimizer.clip_norm = 'no'; needed: a number or \"none\""),
        ("optimizer.betas", "0.9", r"--optimizer.betas = 0.9; needed: a list of 2 numbers"),
        ("train.dtype", "fp64", r"--train.dtype = 'fp64'; needed: \"fp32\" or \"bf16\" or \"fp16\" or \"fp8\""),
        ("metrics.tensorboard", "yes", r"--metrics.tensorboard = 'yes'; needed: true or false"),
        ("train.steps", "0", r"\[train\] steps = 0 must be a whole number of at least 1"),
        ("train.evaluation_samples", "7", r"7 does not divide into whole micro-batches of 2 .*try 6 or 8"),
        ("optimizer.learning_rate", "inf", r"learning_rate = inf must be a finite number"),
        ("runtime.port", "65536", r"port = 65536 must be in 0…65535"),
        ("runtime.timeout_s", "0", r"timeout_s = 0.0 must be a finite number of seconds above 0"),
        ("data.sequence_length", "17", r"sequence_length = 17 exceeds \[model\] max_positions = 16"),
        ("model.vocab_size", "99", r"\[data\] vocab_size = 100 exceeds \[model\] vocab_size = 99"),
        ("learning_rate.warmup_steps", "21", r"warmup_steps = 21 exceeds total_steps = 20"),
    ],
)
def test_a_wrong_override_is_named(tmp_path, name, text, message):
    """A misspelt or unfitting option names itself, what it needs and the nearest right name."""
    with pytest.raises(ConfigError, match=message):
        make_config(small_document(tmp_path), {name: text})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nstpes = 3", r"run.toml: train.stpes is unknown \(did you mean 'steps'"),
        ("[trian]\nsteps = 3", r"run.toml: unknown section \[trian\] \(did you mean 'train'"),
        ("steps = 3", r"run.toml: unknown section \[steps\]"),
        ("train = 3", r"run.toml: train = 3 is a value; needed: a section \[train\]"),
        ('[train]\nsteps = "3"', r"run.toml: train.steps = '3'; needed: a whole number"),
        ("[train]\nsteps = 2026-01-01", r"run.toml: train.steps = .*; needed: a whole number"),
        ("[train\n", r"run.toml is not a TOML file"),
        ("", r"run.toml: model.hidden_size, .*parallel.pipeline, .*train.out are missing; set them in the file"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, monkeypatch, text, message):
    """What is wrong in a file is named with the file, as the user gave it, and its section."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_config("run.toml")
    assert str(tmp_path) not in str(caught.value)


def test_a_missing_file_is_named():
    """A path that leads nowhere is the message's first word."""
    with pytest.raises(ConfigError, match=r"^no/such.toml does not exist; give the path of a configuration"):
        load_config("no/such.toml")


def test_the_learning_rate_ends_with_the_run(tmp_path):
    """total_steps is train.steps where it is left out, also when that is set on the command line."""
    document = without(small_document(tmp_path), "learning_rate", "total_steps")
    assert make_config(document, {"train.steps": "9"}).learning_rate.total_steps == 9


def test_the_models_vocabulary_follows_the_datas(tmp_path):
    """model.vocab_size is that of the vocabulary to train, and has to be given beside a vocabulary file."""
    document = small_document(tmp_path)
    assert make_config(document).model.vocab_size == 100
    assert make_config(without(document, "data", "vocab_size")).model.vocab_size == 4096
    assert make_config(document, {"model.vocab_size": "128"}).model.vocab_size == 128
    file = {"data.vocabulary": "vocab.txt"}
    with pytest.raises(ConfigError, match=r"set data.vocab_size or model.vocab_size"):
        make_config(without(document, "data", "vocab_size"), file)
    assert make_config(document, file).model.vocab_size == 100


def test_sections_are_those_of_the_parts():
    """Every option of every part can be set in a file."""
    assert list(SECTIONS) == [
        "model",
        "data",
        "optimizer",
        "learning_rate",
        "schedule",
        "parallel",
        "train",
        "loss_scale",
        "runtime",
        "metrics",
        "profile",
    ]


def test_layers_are_cut_by_their_cost(tmp_path):
    """A layer costs its multiplications, so a large vocabulary leaves the last stage fewer blocks."""
    config = small_config(tmp_path, model__num_layers=8, parallel__pipeline=4, model__vocab_size=100_000)
    s, h, v = 16, 16, 100_000
    costs = bert_layer_costs(config.model, config.data)
    assert costs[1:-1] == (4 * s * h * h + 2 * s * s * h + 2 * s * h * 4 * h,) * 8
    assert costs[-1] == 2 * (h * h + h * v) + h * h + 2 * h
    assert layout_of_cut(layout_of(config).layer_to_stage, config.model.stacks) == "Ett|t*3|t*3|L"


@pytest.mark.parametrize(
    ("cut", "layout"),
    [
        ("count", "Ett|tt|tt|ttL"),
        ("Et|t*5|t|tL", "Et|t*5|t|tL"),
        ("E|t*8|(|)*0,L", None),
        ("Et*8L", None),
        ("even", None),
    ],
)
def test_layers_are_cut_as_asked(tmp_path, cut, layout):
    """By number of blocks, or as a layout of Megatron-LM's says, which has to have as many stages and blocks."""
    config = small_config(tmp_path, model__num_layers=8, parallel__pipeline=4, parallel__cut=cut)
    if layout is not None:
        assert layout_of_cut(layout_of(config).layer_to_stage, config.model.stacks) == layout
        return
    with pytest.raises(ConfigError, match=r"\[parallel\] cut"):
        layout_of(config)


@pytest.mark.parametrize("name", ["t5-tiny", "ict-tiny"])
def test_a_model_of_two_stacks_is_cut_by_count_and_by_layout(name):
    """An E stands before each stack; what a cut by count is written as gives the same cut."""
    path = next(path for path in CONFIGS if path.stem == name)
    by_count = load_config(path, {"parallel.cut": "count"})
    cut, (first, second) = layout_of(by_count).layer_to_stage, by_count.model.stacks
    layout = layout_of_cut(cut, (first, second))
    assert layout.count("E") == 2
    assert cut[first + 1] == cut[first + 2]
    assert layout_of(load_config(path, {"parallel.cut": layout})).layer_to_stage == cut
    with pytest.raises(ConfigError, match=rf"one E, the {first} t of the first stack, one E, the {second} t of the"):
        layout_of(load_config(path, {"parallel.cut": f"Et*{first}|t*{second}L"}))


@pytest.mark.parametrize(
    ("ramp", "more", "told"),
    [
        ("[8, 4, 100]", {}, r"\[train\] batch_ramp: .* multiples of the samples of one run of all replicas, of 8"),
        ("[8, 24, 100]", {}, r"no whole number of increments of 24"),
        ("[24, 8, 100]", {}, r"a start below the global batch"),
        ("[8, 8, 100]", {"schedule__name": "pipedream", "train__accumulation_runs": 1}, r"asynchronous"),
    ],
)
def test_a_batch_that_cannot_grow_so_is_refused(tmp_path, ramp, more, told):
    """The option is named, with what its numbers have to be multiples of."""
    options = {"train__batch_ramp": ramp, "train__accumulation_runs": 3, "model__tied_decoder": "false"} | more
    with pytest.raises(ConfigError, match=told):
        layout_of(small_config(tmp_path, optimizer__clip_norm="none", **options))


def test_backward_halving_runs_half_micro_batches(tmp_path):
    """With unit = halve the schedule has twice the micro-batches of half the size, and the batch stays."""
    whole = layout_of(small_config(tmp_path))
    halved = layout_of(small_config(tmp_path, schedule__unit="halve"))
    assert (whole.microbatch_size, whole.microbatches_per_run, whole.global_batch) == (2, 4, 8)
    assert (halved.microbatch_size, halved.microbatches_per_run, halved.global_batch) == (1, 8, 8)
    odd = small_config(tmp_path, schedule__unit="halve", train__microbatch_size=3, train__evaluation_samples=9)
    with pytest.raises(ConfigError, match=r"train.microbatch_size = 3 cannot be cut .*try 2 or 4"):
        layout_of(odd)


def test_a_step_counts_runs_and_replicas(tmp_path):
    """The global batch is micro-batch size · micro-batches · accumulation runs · replicas."""
    config = small_config(tmp_path, train__accumulation_runs=3, parallel__data=2)
    assert config.world_size == 4
    assert layout_of(config).microbatches_per_step == 4 * 3 * 2
    assert layout_of(config).global_batch == 48


def test_the_prediction_is_the_simulators(tmp_path):
    """The predicted idle share of 1F1B is (p − 1)/(m + p − 1)."""
    layout = layout_of(small_config(tmp_path, schedule__name="1f1b"))
    assert predicted_bubble(layout.schedule) == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            {"schedule__name": "chimaera"},
            ConfigError,
            r"neither a schedule \(did you mean 'chimera' or 'chimera-zb'\?\)",
        ),
        ({"schedule__microbatches": "none"}, ConfigError, r"schedule.microbatches is missing"),
        ({"parallel__pipeline": 3}, ConfigError, r"try --ranks 2 or 4 \(--ranks is parallel.pipeline here"),
        ({"parallel__pipeline": 6}, UsageError, r"got 6 stages for 4 layers"),
        ({"schedule__chunks": 2}, ConfigError, r"chimera takes no --chunks"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(tmp_path, overrides, error, message):
    """A schedule that is unknown or does not take its sizes, and more stages than layers, are named."""
    with pytest.raises(error, match=message) as caught:
        layout_of(small_config(tmp_path, **overrides))
    assert caught.value.exit_code == 2


def test_a_schedule_file_has_its_own_sizes(tmp_path):
    """A file is read for its schedule; sizes beside it and another number of ranks are refused."""
    text = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n"
    path = tmp_path / "mine.txt"
    path.write_text(text, encoding="utf-8")
    config = small_config(tmp_path, schedule__name=path, schedule__microbatches="none")
    assert layout_of(config).schedule.to_text() == text.splitlines()
    with pytest.raises(ConfigError, match=r"has its own sizes; leave out schedule.microbatches"):
        layout_of(small_config(tmp_path, schedule__name=path))
    with pytest.raises(ConfigError, match=r"has 2 ranks, parallel.pipeline is 1; set parallel.pipeline to 2"):
        layout_of(small_config(tmp_path, schedule__name=path, schedule__microbatches="none", parallel__pipeline=1))


@pytest.mark.parametrize(
    ("name", "parameters", "ranks", "batch"),
    [
        ("gpt2-124m", 124_439_808, 8, 512),
        ("gpt3-175b", 174_604_259_328, 1024, 1536),
        ("t5-base", 222_903_552, 8, 128),
        ("llama3-8b", 8_030_261_248, 64, 512),
    ],
)
def test_published_models_are_configured(name, parameters, ranks, batch):
    """Parameters to the last digit, and the ranks and the batch of the file's own comment."""
    config = load_config(next(path for path in CONFIGS if path.stem == name))
    assert count_parameters(meta_layers(config)) == parameters
    assert (config.world_size, layout_of(config).global_batch) == (ranks, batch)


@pytest.mark.parametrize("path", [p for p in CONFIGS if p.stem.startswith("megatron")], ids=lambda path: path.stem)
def test_the_ten_models_of_megatrons_table_are_configured(path):
    """Each is named by its parameters in 10⁹, which its layers have; GPUs and batch are the table's."""
    config = load_config(path)
    size = float(path.stem.removeprefix("megatron-").removesuffix("b"))
    assert count_parameters(meta_layers(config)) / 1e9 == pytest.approx(size, rel=0.03)
    table = {1.7: (32, 512), 3.6: (64, 512), 7.5: (128, 512), 18.4: (256, 1024), 39.1: (512, 1536)}
    table |= {76.1: (1024, 1792), 145.6: (1536, 2304), 310.1: (1920, 2160), 529.6: (2520, 2520), 1008: (3072, 3072)}
    assert (config.world_size, layout_of(config).global_batch) == table[size]


def test_lists_of_any_length_are_read_and_written(tmp_path):
    """Datasets and weights come from a file or an override, as TOML lists, and read back; a wrong item is named."""
    overrides = {"data.corpus": "bundled", "data.datasets": '["a", "b"]', "data.weights": "[1, 0.5]"}
    config = make_config(small_document(tmp_path), overrides)
    assert (config.data.datasets, config.data.weights) == (("a", "b"), (1.0, 0.5))
    assert make_config(tomllib.loads(to_toml(config))) == config
    with pytest.raises(ConfigError, match=r"data\.weights = \['a'\]; needed: a list, each item a number"):
        make_config(small_document(tmp_path), {"data.weights": '["a"]'})
