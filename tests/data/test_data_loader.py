"""Resuming and loading: the same samples after any stop, for any layout, with and without workers."""

import os
import signal
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.data import BertSamples, Loader, MicrobatchSource, TokenizedDocuments, Vocabulary
from chimera.data.record_samples import RecordSamples
from chimera.errors import DataError

NUM_SAMPLES, BATCH, EPOCHS = 10, 2, 3
NUM_STEPS = EPOCHS * NUM_SAMPLES // BATCH
VOCABULARY = Vocabulary(500, 0, 1, 2, 3, 4, (0, 1, 2, 3, 4))


def ten_samples(microbatch_size=1):
    """Ten samples that are their own numbers, in batches of two."""
    records = [{"id": number} for number in range(NUM_SAMPLES)]
    samples = RecordSamples(records, {"id": "id"}, seed=5)
    return MicrobatchSource(samples, microbatch_size, BATCH // microbatch_size)


def ids_of(microbatches):
    return torch.cat([microbatch["id"] for microbatch in microbatches]).tolist() if microbatches else []


def steps_read(first, last, *, replicas=1, workers=0, microbatch_size=1):
    """The samples of some steps, each step's in the order of replicas."""
    make = partial(ten_samples, microbatch_size)
    steps = [[] for _ in range(first, last)]
    for replica in range(replicas):
        with Loader(
            make(),
            replica=replica,
            replicas=replicas,
            fields=["id"],
            first_step=first,
            last_step=last,
            workers=workers,
            make_source=make,
        ) as loader:
            for ids in steps:
                ids.extend(ids_of(loader.next()))
    return steps


def test_an_epoch_meets_every_sample_once():
    """Three epochs of five steps: each meets all ten, in an order of its own."""
    steps = steps_read(0, NUM_STEPS)
    epochs = [list(chain.from_iterable(steps[5 * epoch : 5 * epoch + 5])) for epoch in range(EPOCHS)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_SAMPLES))] * EPOCHS
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_stop_after_any_step_changes_nothing(replicas):
    """Stopped after every step up to the third epoch's last: the same samples as without a stop."""
    whole = steps_read(0, NUM_STEPS)
    for stop in range(NUM_STEPS + 1):
        resumed = steps_read(0, stop, replicas=replicas) + steps_read(stop, NUM_STEPS, replicas=replicas)
        assert resumed == whole


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stop", [7, *(pytest.param(n, marks=pytest.mark.long) for n in range(NUM_STEPS) if n != 7)])
def test_workers_change_nothing(replicas, stop):
    """Two workers read the steps before and after a stop as the rank itself does."""
    before = steps_read(0, stop, replicas=replicas, workers=2) if stop else []
    after = steps_read(stop, NUM_STEPS, replicas=replicas, workers=2)
    assert before + after == steps_read(0, NUM_STEPS)


@settings(deadline=None)
@given(st.integers(0, 200), st.sampled_from([(1, 1), (1, 2), (2, 1)]), st.sampled_from([(1, 1), (1, 2), (2, 1)]))
def test_another_layout_keeps_the_global_order(stop, before, after):
    """With another b and d from some step on, every step still holds the same samples in the same order."""

    def step(number, size, replicas):
        source = ten_samples(size)
        count = source.microbatches_of(number)
        return ids_of([source.microbatch(number, index) for index in range(count // replicas * replicas)])

    assert step(stop, *before) == step(stop, *after)


def test_only_the_fields_asked_for_are_made():
    """A rank without any need reads nothing; one without ids or labels hides no token."""
    words = np.random.default_rng(0).integers(5, 500, (6, 6, 5)).tolist()
    samples = BertSamples(
        TokenizedDocuments.from_ids(words, vocab_size=500), sequence_length=24, seed=0, vocabulary=VOCABULARY
    )
    source = MicrobatchSource(samples, 2, 2)
    whole = source.microbatch(3, 1)
    for fields in (["attention_mask"], ["mlm_labels", "nsp_labels"], ["input_ids", "token_type_ids"], []):
        part = source.microbatch(3, 1, fields)
        assert sorted(part) == sorted(fields)
        assert all(torch.equal(part[name], whole[name]) for name in fields)
    assert "mlm_labels" not in samples.sample(0, ["attention_mask"])
    with Loader(source, fields=[], first_step=0, last_step=1) as loader:
        assert loader.next() == [{}, {}]


@dataclass
class Faulty:
    """Records that fail from the tenth step on, in one way or another."""

    way: str

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        if index and self.way == "raises":
            raise OSError("Stale file handle: shard-17")
        if index and self.way == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if index and self.way == "hangs":
            signal.pause()
        return {"id": 0}


def faulty_source(way):
    return MicrobatchSource(RecordSamples(Faulty(way), {"id": "id"}, seed=0, name="shards"), 1, 1)


@pytest.mark.parametrize(
    ("way", "timeout_s", "message"),
    [
        ("raises", 60, r"data worker \d reading set/of/files for step 1: Stale file handle: shard-17"),
        ("dies", 60, r"reading set/of/files for step 1: .*exited unexpectedly.*try data\.workers 0"),
        ("hangs", 3, r"reading set/of/files for step 1: .*timed out.*takes longer than 3 s"),
    ],
)
def test_a_reader_that_fails_is_named(way, timeout_s, message):
    """An error, a death and a hang in a worker end the step with the worker's work, the files and what to try."""
    with (
        Loader(
            MicrobatchSource(RecordSamples([{"id": 0}], {"id": "id"}, seed=0), 1, 1),
            fields=["id"],
            first_step=0,
            last_step=9,
            workers=1,
            make_source=partial(faulty_source, way),
            timeout_s=timeout_s,
            name="set/of/files",
        ) as loader,
        pytest.raises(DataError, match=message),
    ):
        loader.next()


def test_waiting_is_measured():
    """The seconds of the latest step's micro-batches stand beside them."""
    with Loader(ten_samples(), fields=["id"], first_step=0, last_step=3) as loader:
        assert loader.waited_s == 0.0
        loader.next()
        assert loader.waited_s > 0.0
