"""Plans in the words of other systems."""

import tomllib

import pytest

from chimera.errors import UsageError
from chimera.plan.export import SYSTEMS, export
from chimera.plan.layout import Layout
from chimera.plan.layout_string import parse_layout
from chimera.plan.shape import ModelShape

GPT = ModelShape(family="gpt", hidden=4096, layers=32, heads=32, vocab=50257, seq=2048)
LLAMA = ModelShape(
    family="llama",
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    vocab=128256,
    seq=4096,
    ffn=14336,
    gated=True,
    tied=False,
)


def test_megatron_gets_its_flags():
    """Sizes, chunks, recomputation, sharding and sequence parallelism as Megatron-LM spells them."""
    layout = Layout(
        tensor=2,
        pipeline=4,
        data=4,
        microbatch=2,
        microbatches=8,
        schedule="interleaved",
        chunks=2,
        recompute="selective",
        sequence_parallel=True,
        sharded=True,
    )
    assert export("megatron", GPT, layout).replace(" \\\n", "\n").splitlines() == [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 4",
        "--micro-batch-size 2",
        "--global-batch-size 64",
        "--num-layers 32",
        "--hidden-size 4096",
        "--ffn-hidden-size 16384",
        "--num-attention-heads 32",
        "--seq-length 2048",
        "--max-position-embeddings 2048",
        "--num-layers-per-virtual-pipeline-stage 4",
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--recompute-granularity selective",
    ]


def test_an_uneven_cut_is_a_layout_string():
    """Stages that differ are written in Megatron-LM's layout language, equal ones in a row joined."""
    layout = Layout(pipeline=4, microbatches=4, cut=(9, 8, 8, 7))
    assert '--pipeline-model-parallel-layout "Et*9|t*8|t*8|t*7L"' in export("megatron", GPT, layout)


def test_grouped_queries_and_gates_are_said():
    """What a Llama has that a GPT has not."""
    flags = export("megatron", LLAMA, Layout())
    for flag in (
        "--group-query-attention",
        "--num-query-groups 8",
        "--swiglu",
        "--untie-embeddings-and-output-weights",
        "--normalization RMSNorm",
        "--position-embedding-type rope",
        "--disable-bias-linear",
    ):
        assert flag in flags


def test_torchtitan_gets_its_settings():
    """The TOML reads back, with the schedule's name in torch and the modules of every stage."""
    layout = Layout(
        pipeline=2,
        data=4,
        tensor=2,
        microbatches=8,
        schedule="interleaved",
        chunks=2,
        sharded=True,
        sequence_parallel=True,
    )
    settings = tomllib.loads(export("torchtitan", LLAMA, layout))
    parallelism = settings["parallelism"]
    assert parallelism["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert parallelism["data_parallel_shard_degree"] == 4
    assert settings["training"]["local_batch_size"] == 8
    modules = parallelism["module_fqns_per_model_part"]
    assert len(modules) == 4
    assert modules[0][:2] == ["tok_embeddings", "layers.0"]
    assert modules[-1][-3:] == ["layers.31", "norm", "output"]


def test_nanotron_gets_its_yaml():
    """Parallel sizes and the batch as nanotron spells them."""
    text = export(
        "nanotron", LLAMA, Layout(pipeline=4, data=2, tensor=8, microbatch=2, microbatches=16, sequence_parallel=True)
    )
    assert "  pp_engine: 1f1b\n" in text
    assert "  tp_mode: REDUCE_SCATTER\n" in text
    assert "  batch_accumulation_per_replica: 16\n" in text


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_schedule_that_the_other_system_lacks_is_refused(system):
    """Nothing is exported that would run as another schedule."""
    with pytest.raises(UsageError, match=r"has no schedule 'chimera'; it has .*--schedules"):
        export(system, LLAMA, Layout(pipeline=4, microbatches=8, schedule="chimera"))


T5 = ModelShape(family="t5", hidden=512, layers=6, encoder_layers=6, heads=8, vocab=32128, seq=512)


@pytest.mark.parametrize(
    ("system", "shape", "layout", "message"),
    [
        ("nanotron", LLAMA, Layout(recompute="selective"), "no recompute mode 'selective'.*--recompute none full"),
        ("nanotron", LLAMA, Layout(pipeline=2, cut=(17, 15)), "cuts stages itself.*--uneven False"),
        ("nanotron", GPT, Layout(), "not written for gpt models, but for llama"),
        ("torchtitan", GPT, Layout(), "not written for gpt models, but for llama"),
        ("torchtitan", LLAMA, Layout(tensor=2), "always has sequence parallelism.*--sequence-parallel True"),
        ("megatron", T5, Layout(), "not written for t5 models"),
        (
            "megatron",
            GPT,
            Layout(pipeline=4, microbatches=6, schedule="interleaved", chunks=2),
            "m = 6 is no multiple of p = 4",
        ),
    ],
)
def test_what_the_other_system_has_no_word_for_is_refused(system, shape, layout, message):
    """A choice that would be dropped, or turn into another one, is named with what to plan again with."""
    with pytest.raises(UsageError, match=message):
        export(system, shape, layout)


def test_a_layout_string_is_one_that_our_own_reader_takes():
    """What Megatron-LM gets is of the grammar that train's cuts are read by, with the cut's blocks."""
    cut = (9, 8, 8, 7)
    flags = export("megatron", GPT, Layout(pipeline=4, microbatches=4, cut=cut))
    (text,) = (line.split('"')[1] for line in flags.splitlines() if "pipeline-model-parallel-layout" in line)
    assert [stage.count("t") for stage in parse_layout(text)] == list(cut)
