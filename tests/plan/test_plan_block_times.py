"""Measured times of blocks in place of modelled ones."""

from pathlib import Path

import pytest

from chimera.errors import FormatError, UsageError
from chimera.plan.block_times import BlockTimes, read_block_times
from chimera.plan.hardware import Cluster
from chimera.plan.hardware_file import read_device
from chimera.plan.layers import LayerTimes
from chimera.plan.planning import plan
from chimera.plan.search.space import SearchSpace
from chimera.plan.validate_chimera import BERT_48

MEASURED = Path(__file__).parents[3] / "shared" / "tables" / "block_times.csv"
HEAD = "gpu,model,seq,micro_batch,forward_ms,backward_ms\n"


def written(tmp_path, text):
    path = tmp_path / "blocks.csv"
    path.write_text(text)
    return path


def test_a_profile_is_read_in_seconds(tmp_path):
    """Rows are ordered by size; times are seconds."""
    path = written(tmp_path, HEAD + "p100,bert,128,2,1.5,2.5\np100,bert,128,1,1,2\n")
    assert read_block_times(path) == BlockTimes("p100/bert", 128, (1, 2), (1e-3, 1.5e-3), (2e-3, 2.5e-3))


def test_a_backward_divides_as_the_modelled_one_and_recomputes_the_measured_forward():
    """I and W keep their share of B; under full recomputation the measured forward counts to I."""
    times = BlockTimes("p100/bert", 128, (1, 3), (1.0, 3.0), (2.0, 4.0))
    modelled = LayerTimes(2.0, 3.0 + 2.0, 1.0, 0.5)
    assert times.block(modelled, microbatch=2, recomputes=1.0)[:3] == (2.0, 2.25 + 2.0, 0.75)


@pytest.mark.parametrize(
    ("text", "profile", "error", "message"),
    [
        ("gpu,model\n", None, FormatError, "lacks seq, micro_batch, forward_ms, backward_ms"),
        (HEAD + "a,m,1,1,1,1\nb,m,1,1,1,1\n", None, UsageError, "holds several profiles.*a/m, b/m"),
        (HEAD + "a,m,1,1,1,1\n", "a/n", UsageError, "has none of this name.*'a/m'"),
        (HEAD + "a,m,1,1,x,1\n", None, FormatError, "line 2: forward_ms is 'x'; needed: a number"),
        (HEAD + "a,m,1,1,1,1\na,m,1,1,1,1\n", None, FormatError, "a micro-batch size twice"),
        (HEAD, None, FormatError, "holds no row"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, profile, error, message):
    """Columns, names and numbers that are missing or wrong are named."""
    with pytest.raises(error, match=message):
        read_block_times(written(tmp_path, text), profile)


def test_a_profile_of_other_sequences_is_refused():
    """Blocks measured on 64 tokens say nothing of 128."""
    with pytest.raises(UsageError, match=r"on 64 tokens, the model is bert on 128; try --seq 64"):
        plan(
            BERT_48,
            Cluster.of(read_device("p100-16"), 8),
            global_batch=64,
            measured=BlockTimes("p100/bert", 64, (1,), (1.0,), (1.0,)),
        )


@pytest.mark.skipif(not MEASURED.is_file(), reason="other people's measurements, which are no part of the repository")
def test_measured_blocks_give_chimeras_choice():
    """With the paper's measured block times the search picks (d, p, b) = (8, 4, 8) for Bert-48 on 32 P100 nodes."""
    found = plan(
        BERT_48,
        Cluster.of(read_device("p100-16"), 32),
        global_batch=512,
        space=SearchSpace(schedules=("chimera",), pairs=(1,), sharded=(False,), recompute=("none",), uneven=(False,)),
        software="chimera-2021",
        measured=read_block_times(MEASURED, "p100/bert-large"),
        refine=False,
    )
    layout = found.best.layout
    assert (layout.data, layout.pipeline, layout.microbatch) == (8, 4, 8)
