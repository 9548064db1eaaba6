"""Blends in exact proportion, growing batches, and records of other libraries."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.data import BatchRamp, BlendedSamples, MicrobatchSource
from chimera.data.record_samples import RecordSamples, open_huggingface, open_streaming
from chimera.data.samples import blend_period
from chimera.errors import ConfigError, DataError


class Numbers:
    """Samples that say which set and which index they are."""

    fields = ("set", "index")

    def __init__(self, number, length):
        self.number, self.length = number, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"set": np.array(self.number), "index": np.array(index)}

    def sample(self, index, fields):
        return {name: value for name, value in self[index].items() if name in fields}


counts = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@settings(deadline=None)
@given(counts)
def test_every_prefix_of_a_blend_is_in_proportion(numbers):
    """After n samples each set has come within one of n times its share, and exactly so after a period."""
    order = blend_period(numbers)
    shares = np.array(numbers) / sum(numbers)
    come = np.cumsum(order[:, None] == np.arange(len(numbers)), axis=0)
    expected = np.arange(1, len(order) + 1)[:, None] * shares
    assert (abs(come - expected) < 1).all()
    assert come[-1].tolist() == numbers


@settings(deadline=None, max_examples=30)
@given(counts, st.integers(0, 10**6))
def test_each_set_is_gone_through_in_order(numbers, start):
    """Wherever one looks, a set's samples come one after another, none left out and none twice."""
    sets = [Numbers(number, 10) for number in range(len(numbers))]
    blended = BlendedSamples(sets, [float(number) for number in numbers])
    seen = {}
    for index in range(start, start + 3 * sum(numbers)):
        sample = blended[index]
        seen.setdefault(int(sample["set"]), []).append(int(sample["index"]))
    assert all(after == before + 1 for indices in seen.values() for before, after in pairwise(indices))
    firsts = {}
    for index in range(sum(numbers)):
        number, within = blended.source_of(index)
        firsts.setdefault(number, within)
    assert firsts == dict.fromkeys(range(len(numbers)), 0)


def test_weights_are_taken_as_they_are_written():
    """0.1 is a tenth, not the nearest binary fraction: ten samples hold it once."""
    blended = BlendedSamples([Numbers(0, 9), Numbers(1, 30)], [0.1, 0.9])
    assert [blended.source_of(index)[0] for index in range(20)].count(0) == 2
    assert len(blended) == max(9 * 10, -(-30 * 10 // 9))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "has 1 numbers for 2 datasets"),
        ([1.0, 0.0], r"has 0\.0; each must be a number above 0"),
        ([1.0, float("nan")], "has nan"),
        ([0.123456789, 0.5], "only repeats after .* round them, to 0.01 say"),
    ],
)
def test_weights_without_a_meaning_are_refused(weights, message):
    """Named with the option."""
    with pytest.raises(ConfigError, match=rf"data\.weights .*{message}|data\.weights {message}"):
        BlendedSamples([Numbers(0, 9), Numbers(1, 9)], weights)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(1, 500))
def test_a_ramp_uses_every_sample_once(size, start, growths, samples):
    """Steps follow one another without a gap, never shrink, and end at the global batch."""
    target = size * (start + growths)
    source = MicrobatchSource(Numbers(0, 10), size, start + growths, BatchRamp(size * start, size, samples))
    steps = list(range(samples + growths + 5))
    starts = [source.sample_indices(step, 0).start for step in steps]
    sizes = [source.microbatches_of(step) * size for step in steps]
    assert starts[0] == 0
    assert [after - before for before, after in pairwise(starts)] == sizes[:-1]
    assert sizes[0] == size * start
    assert all(before <= after for before, after in pairwise(sizes))
    assert sizes[-1] == target
    full = next(step for step in steps if sizes[step] == target)
    assert starts[full] >= samples


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        (BatchRamp(16, 4, 100), "needed: a start below the global batch"),
        (BatchRamp(8, 3, 100), "no whole number of increments"),
        (BatchRamp(6, 2, 100), "must be multiples of the micro-batch of 4"),
    ],
)
def test_a_ramp_that_leads_nowhere_is_refused(ramp, message):
    """A start too large, or sizes that micro-batches do not fill."""
    with pytest.raises(ConfigError, match=message):
        MicrobatchSource(Numbers(0, 10), 4, 4, ramp)


def test_records_are_samples():
    """Every record once an epoch, in another order each time, its columns under the fields' names."""
    records = [{"ids": [n, n + 1], "label": n} for n in range(20)]
    samples = RecordSamples(records, {"input_ids": "ids", "labels": "label"}, seed=3)
    epochs = [[int(samples[20 * epoch + index]["labels"]) for index in range(20)] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    batch = MicrobatchSource(samples, 4, 2).microbatch(0, 1)
    assert batch["input_ids"].tolist() == [[n, n + 1] for n in epochs[0][4:8]]
    assert batch["labels"].dtype == torch.int64


def test_records_that_cannot_be_samples_are_named():
    """A missing column, text, another length: with the record's number."""
    with pytest.raises(DataError, match=r"hub: record 0 has no column 'id' \(did you mean 'ids'\?\); it has ids"):
        RecordSamples([{"ids": [1]}], {"input_ids": "id"}, seed=0, name="hub")
    with pytest.raises(DataError, match=r"record 0 has 'ids' of type .*; needed: whole numbers"):
        RecordSamples([{"ids": ["a"]}], {"input_ids": "ids"}, seed=0)
    samples = RecordSamples([{"ids": [1]}, {"ids": [1, 2]}], {"input_ids": "ids"}, seed=0)
    with pytest.raises(DataError, match=r"record 1 has 'ids' of shape \(2,\), the first one of \(1,\)"):
        list(map(samples.__getitem__, range(2)))
    with pytest.raises(DataError, match="has no record"):
        RecordSamples([], {"input_ids": "ids"}, seed=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_table_of_hugging_face_is_a_source(tmp_path):
    """What save_to_disk wrote comes out as micro-batches; a dictionary of splits is refused by name."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict({"input_ids": [[n, n] for n in range(6)]})
    table.save_to_disk(str(tmp_path / "table"))
    samples = RecordSamples(open_huggingface(str(tmp_path / "table")), {"input_ids": "input_ids"}, seed=0)
    rows = MicrobatchSource(samples, 6, 1).microbatch(0, 0)["input_ids"].tolist()
    assert sorted(rows) == [[n, n] for n in range(6)]
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match="holds the splits train; give the folder of one"):
        open_huggingface(str(tmp_path / "splits"))
    with pytest.raises(DataError, match="is no dataset that save_to_disk wrote"):
        open_huggingface(str(tmp_path / "nothing"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_shards_of_mosaicml_are_a_source(tmp_path):
    """Shards written by its own writer come out as micro-batches."""
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")
    with streaming.MDSWriter(out=str(tmp_path), columns={"input_ids": "ndarray:int64"}) as writer:
        for n in range(6):
            writer.write({"input_ids": np.array([n, n])})
    samples = RecordSamples(open_streaming(str(tmp_path)), {"input_ids": "input_ids"}, seed=0)
    rows = MicrobatchSource(samples, 6, 1).microbatch(0, 0)["input_ids"].tolist()
    assert sorted(rows) == [[n, n] for n in range(6)]
