"""The record of a run, and its trackers: what they get, what they survive, and that no secret reaches them."""

import json
import sqlite3
import threading
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
from small_records import ORIGIN, evaluation, record_of, step
from small_runs import small_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from chimera.cli.training import run_local
from chimera.errors import ConfigError, FormatError
from chimera.train.config import MetricsOptions
from chimera.train.events import TrackerFailed
from chimera.train.metrics import read_rows
from chimera.train.tracking import extras
from chimera.train.tracking.command import Command
from chimera.train.tracking.guard import Guarded, InBackground
from chimera.train.tracking.json_lines import JsonLines
from chimera.train.tracking.masking import MASK, Masker
from chimera.train.tracking.mlflow import MlFlow
from chimera.train.tracking.record import TrackerRecord, read_record, write_record
from chimera.train.tracking.tensorboard import TensorBoard
from chimera.train.tracking.tracking import Tracking
from chimera.train.tracking.wandb import WeightsAndBiases

SECRET = "sEsAmE-0pen-9f31"  # noqa: S105 - of nothing
needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb (extra wandb) is not installed")
needs_mlflow = pytest.mark.skipif(
    find_spec("mlflow") is None or find_spec("sqlalchemy") is None, reason="mlflow (extra mlflow) is not installed"
)


class Memory:
    """A tracker that keeps what it gets, and fails where it is told to."""

    name = "memory"

    def __init__(self, *, may_wait=False, fails_at=(), waits_for=None):
        self.may_wait = may_wait
        self.fails_at = fails_at
        self.waits_for = waits_for
        self.rows = []
        self.records = []

    def open(self, record):
        """Keep the record."""
        self.records.append(record)
        if "open" in self.fails_at:
            raise ConnectionError(f"no way to https://me:{SECRET}@host")
        return "name-of-run"

    def add(self, rows):
        """Keep rows, or refuse those of some steps."""
        if self.waits_for is not None:
            self.waits_for.wait(30)
        if any(row.step in self.fails_at for row in rows):
            raise OSError(28, "No space left on device")
        self.rows += rows

    def close(self, record):
        """Keep the record."""
        self.records.append(record)


def tracking(folder, trackers, *, from_step=0, started_s=None, reported=None, **config):
    """Return the tracking of a small run in ``folder``."""
    command = Command(("chimera", "train", "--api-key", MASK), 1000.0 if started_s is None else started_s)
    return Tracking(
        small_config(folder, **config),
        folder,
        trackers,
        command,
        ORIGIN,
        from_step=from_step,
        report=(reported if reported is not None else []).append,
    )


# The record


def test_a_record_is_read_as_written(tmp_path):
    """What is written is read back as the same value; the file has a summary for those that derive nothing."""
    record = record_of(step=7, carried_s=2.0, steps_s=30.0, data_wait_s=10.0, tokens=4000, first_step_s=8.0)
    record = replace(record, trackers={"mlflow": TrackerRecord(reference="a", lost_rows=3, first_failure="step 4: x")})
    write_record(record, tmp_path)
    assert read_record(tmp_path) == replace(record, config=json.loads(json.dumps(record.config)))
    summary = json.loads((tmp_path / "run.json").read_text())["summary"]
    assert summary["effective_share"] == pytest.approx(32 / 100)
    assert summary["tokens_per_s"] == pytest.approx(4000 / 40)
    assert (summary["state"], summary["steps_done"], summary["time_to_first_step_s"]) == ("running", 7, 8.0)
    assert summary["started_at"] == "1970-01-01T00:16:40+00:00"


def test_no_record_is_none(tmp_path):
    """A folder without a record has none."""
    assert read_record(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "ten"}, r"run.json: 'steps' is 'ten': input should be a valid integer"),
        ({"starts": []}, r"run.json: has no starts"),
        ({"more": 1}, r"run.json: 'more' is 1: unexpected keyword argument; needed: a chimera-run file"),
        ({"version": 99}, r'run.json: got "version": 99'),
    ],
)
def test_a_foreign_record_is_named(tmp_path, change, message):
    """A file that is no record is refused with the place in it."""
    write_record(record_of(), tmp_path)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError, match=message):
        read_record(tmp_path)


def test_time_is_accounted_over_restarts(tmp_path):
    """Steps that a restart makes again count once; the wall time runs on from the first start, the stop included."""
    first = tracking(tmp_path, [JsonLines(tmp_path)], started_s=1000.0)
    for number in (1, 2, 3):
        first.add(replace(step(number), step_s=2.0, data_wait_s=0.5))
    first.saved(0.25)
    first.evaluated(0.75)
    first.close(KeyboardInterrupt())
    again = tracking(tmp_path, [JsonLines(tmp_path)], from_step=2, started_s=1010.0)
    again.add(replace(step(3), step_s=4.0, data_wait_s=1.0))
    again.close(None)
    record = read_record(tmp_path)
    assert record.starts == again.record.starts
    one, two = record.starts
    assert (one.step, one.end, one.steps_s, one.data_wait_s) == (3, "interrupted", 4.5, 1.5)
    assert (two.from_step, two.step, two.end, two.carried_s, two.steps_s) == (2, 3, "finished", 3.0, 3.0)
    assert record.useful_s == 6.0
    assert record.wall_s == pytest.approx(two.seen_s - 1000.0)
    summary = record.summary()
    assert (summary["restarts"], summary["evaluation_s"], summary["checkpoint_s"]) == (1, 0.75, 0.25)
    assert summary["data_wait_s"] == 2.5
    assert one.tokens == 3 * 200


def test_a_killed_start_is_called_so(tmp_path):
    """A start that could not write its end gets one from the next."""
    tracking(tmp_path, [Memory()]).add(step(1))
    assert read_record(tmp_path).last.end is None
    tracking(tmp_path, [Memory()], from_step=1).close(None)
    assert [start.end for start in read_record(tmp_path).starts] == ["killed", "finished"]


# Failures


def test_a_failing_tracker_ends_nothing_and_is_said_once(tmp_path):
    """Rows that a tracker refuses are counted, its first failure is reported once and stands in the record."""
    reported = []
    broken, whole = Memory(fails_at=(2, 3)), JsonLines(tmp_path)
    run = tracking(tmp_path, [whole, broken], reported=reported)
    for number in (1, 2, 3, 4):
        run.add(step(number))
    run.close(None)
    failure = "step 2: OSError: [Errno 28] No space left on device"
    assert reported == [TrackerFailed("memory", failure)]
    assert read_record(tmp_path).trackers["memory"] == TrackerRecord(
        reference="name-of-run", lost_rows=2, first_failure=failure
    )
    assert [row.step for row in broken.rows] == [1, 4]
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    """A line that could be written only in part is taken back, so that the next one can be read."""
    lines = JsonLines(tmp_path)
    lines.open(record_of())
    lines.add([step(1)])
    (file,) = (file for file in lines._files.values() if file.name == tmp_path / "metrics.jsonl")

    class Full:
        """The file on a disk with room for ten more bytes."""

        def __getattr__(self, name):
            return getattr(file, name)

        def write(self, content):
            return file.write(content[:10])

    guarded = Guarded(lines, Masker())
    with monkeypatch.context() as patch:
        patch.setitem(lines._files, type(step(1)), Full())
        guarded.add(step(2))
    assert guarded.outcome.lost_rows == 1
    assert guarded.outcome.first_failure == "step 2: OSError: 10 of 175 bytes were written; the disk may be full"
    guarded.add(step(3))
    guarded.close(record_of(), within_s=30)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 3]


def test_a_waiting_tracker_stops_nobody():
    """Rows for a tracker that waits for a server are taken at once, and handed over together when it answers."""
    answer = threading.Event()
    tracker = Memory(may_wait=True, waits_for=answer)
    driven = InBackground(tracker, Masker(), together_s=0.01)
    driven.open(record_of())
    for number in range(1, 50):
        driven.add(step(number))
    assert tracker.rows == []
    answer.set()
    driven.close(record_of(), within_s=30)
    assert [row.step for row in tracker.rows] == list(range(1, 50))
    assert driven.outcome == TrackerRecord(reference="name-of-run")


def test_a_tracker_that_never_answers_is_left_behind():
    """At the end a run waits for a tracker only so long, and says how many rows may be missing."""
    driven = InBackground(Memory(may_wait=True, waits_for=threading.Event()), Masker(), together_s=0.01)
    driven.open(record_of())
    for number in (1, 2, 3):
        driven.add(step(number))
    driven.close(record_of(), within_s=0.2)
    assert driven.outcome.first_failure == "closing: it was not done within 0.2 s"
    assert driven.outcome.lost_rows == 3


def test_a_tracker_that_cannot_open_loses_all_and_keeps_the_secret():
    """Without a connection every row is lost, and the address in the message has no password."""
    driven = InBackground(Memory(may_wait=True, fails_at=("open",)), Masker(), together_s=0.01)
    driven.open(record_of())
    driven.add(step(1))
    driven.close(record_of(), within_s=30)
    assert driven.outcome == TrackerRecord(
        lost_rows=1, first_failure="opening: ConnectionError: no way to https://***@host"
    )


@pytest.mark.parametrize(("option", "missing"), [("wandb", "wandb"), ("mlflow", "mlflow and sqlalchemy and alembic")])
def test_a_missing_package_names_its_extra(monkeypatch, option, missing):
    """A tracker without its package is refused before anything starts, with the words that install it."""
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    message = rf"\[metrics\] {option} = true needs {missing}, .*pip install 'chimera-pipeline\[{option}\]'"
    with pytest.raises(ConfigError, match=message):
        extras.require_trackers(MetricsOptions(**{option: True}), {})


def test_a_server_needs_no_store_of_ones_own(monkeypatch):
    """MLflow on a server needs the client alone."""
    monkeypatch.setattr(extras, "find_spec", lambda name: name if name == "mlflow" else None)
    extras.require_trackers(MetricsOptions(mlflow=True), {"MLFLOW_TRACKING_URI": "https://mlflow.example"})


# The real ones


def test_tensorboard_has_the_run_as_texts(tmp_path):
    """Options, origin and outcome stand beside the scalars."""
    board = TensorBoard(tmp_path)
    board.open(record_of())
    board.close(record_of(step=3, end="finished"))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "| optimizer.betas | (0.9, 0.999) |" in texts["config/text_summary"]
    assert "| commit | 0123456789abcdef, with changes |" in texts["run/text_summary"]
    assert "| state | finished |" in texts["outcome/text_summary"]


@needs_wandb
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_keeps_a_run_offline(tmp_path, monkeypatch):
    """Without a network every row, the options and the outcome are in the files that 'wandb sync' sends later."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WeightsAndBiases(tmp_path, "project-of-a-test")
    reference = tracker.open(record_of())
    tracker.add([step(1), evaluation(1)])
    tracker.close(record_of(step=1, end="finished"))
    (written,) = tmp_path.glob(f"wandb/offline-run-*-{reference}/run-{reference}.wandb")
    words = (b"project-of-a-test", b"train/mlm_loss", b"heldout/nsp_accuracy", b"betas", b"run/effective_share")
    # Its process has said that it is done a moment before the last of the file is written.
    deadline = time.monotonic() + 10.0
    while not all(word in written.read_bytes() for word in words) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [word for word in words if word not in written.read_bytes()] == []


@needs_mlflow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_goes_on_with_its_run(tmp_path, monkeypatch):
    """Figures, options, origin and outcome are in the store, and a restart adds to the same run."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    tracker = MlFlow(tmp_path, "tests")
    reference = tracker.open(record_of())
    tracker.add([step(1), step(2), evaluation(2)])
    tracker.close(record_of(step=2, end="failed: x"))
    again = MlFlow(tmp_path, "tests")
    known = {"mlflow": TrackerRecord(reference=reference)}
    assert again.open(record_of(from_step=2, trackers=known)) == reference
    again.add([step(3)])
    again.close(record_of(step=3, end="finished"))
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        found = store.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()
        assert found == [(1, 1.5), (2, 2.5), (3, 3.5)]
        assert store.execute("select value from metrics where key = 'heldout/mlm_loss'").fetchall() == [(7.5,)]
        assert dict(store.execute("select key, value from params"))["train.steps"] == "10"
        tags = dict(store.execute("select key, value from tags"))
        assert store.execute("select status, name from runs").fetchall() == [("FINISHED", "run")]
    assert tags["mlflow.source.git.commit"] == "0123456789abcdef"
    assert tags["run.state"] == "finished"
    assert tags["hosts"] == "node1, node2"


def test_no_secret_reaches_a_file_of_a_run(tmp_path, monkeypatch):
    """Secrets in variables, in the command and in URLs are in no file that a run and its trackers write."""
    installed = {name: find_spec(name) is not None for name in ("wandb", "mlflow", "sqlalchemy")}
    for name, value in (
        ("WANDB_API_KEY", f"{SECRET}-{'0' * 40}"),
        ("WANDB_MODE", "offline"),
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("MLFLOW_TRACKING_PASSWORD", SECRET),
        ("HF_ENDPOINT", f"https://me:{SECRET}@hub.example"),
        ("NCCL_TOKEN", SECRET),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("sys.argv", ["chimera", "train", "run.toml", "--hub.token", SECRET, f"ftp://a:{SECRET}@b"])
    config = small_config(
        tmp_path,
        train__steps=2,
        metrics__tensorboard="true",
        metrics__wandb=str(installed["wandb"]).lower(),
        metrics__mlflow=str(installed["mlflow"] and installed["sqlalchemy"]).lower(),
    )
    result = run_local(config)
    origin = result.record.last.origin
    assert origin.command == ("chimera", "train", "run.toml", "--hub.token", MASK, f"ftp://{MASK}@b")
    assert origin.environment["NCCL_TOKEN"] == origin.environment["WANDB_API_KEY"] == MASK
    assert origin.environment["HF_ENDPOINT"] == f"https://{MASK}@hub.example"
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"run.json", "metrics.jsonl", "config.toml"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert {name: each.first_failure for name, each in result.record.trackers.items() if each.first_failure} == {}
    assert len(result.record.trackers) == 2 + config.metrics.wandb + config.metrics.mlflow
