"""``chimera checkpoint``: what is told of a checkpoint, and weights that leave it as they are."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from small_runs import small_config, small_overrides

from chimera.cli.main import main
from chimera.cli.training import run_local
from chimera.errors import CheckpointError
from chimera.models.huggingface import HuggingFaceWeights
from chimera.tensor.sharding import WHOLE
from chimera.train.checkpoint import load_tensors, read_checkpoint
from chimera.train.conversion import export_checkpoint
from chimera.train.stored import parameter_shapes, stored_tensors


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Make a run with two checkpoints and return its folder."""
    folder = tmp_path_factory.mktemp("checkpoint")
    run_local(small_config(folder, train__steps=2, train__checkpoint_interval=1))
    return folder / "run"


@pytest.fixture
def newest(run, tmp_path):
    """Return a copy of the newest checkpoint, to be damaged."""
    return shutil.copytree(run / "checkpoints" / "step-00000002", tmp_path / "step-00000002")


def weights_of(checkpoint):
    """Return the weights of a checkpoint by their parameters' names."""
    tensors = load_tensors(checkpoint, lambda name: name.startswith("model."))
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def test_a_run_shows_all_its_checkpoints(run, capsys):
    """Each has its step, layout and sizes, and is called whole."""
    assert main(["checkpoint", "inspect", str(run)]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith(f"{run}/checkpoints/step-00000001: step 1, whole\n")
    lines = second.splitlines()
    assert lines[0] == f"{run}/checkpoints/step-00000002: step 2, whole"
    assert lines[1:4] == [
        "  model       BERT, 2 layers, hidden size 16, trained in fp32",
        "  layout      chimera; 2 = 2 pipeline x 1 data x 1 tensor ranks; it fits any other with 8 samples a step",
        "  optimizer   adamw after 2 updates",
    ]
    assert lines[4] == "  weights     9,190 values in 38 tensors, F32, 35.9 KiB"
    assert [line.split()[0] for line in lines[5:]] == ["exp_avg", "exp_avg_sq", "files"]


def test_json_says_the_same(run, capsys):
    """--json has the parts in numbers, and with --tensors each tensor as its file has it."""
    path = run / "checkpoints" / "step-00000002"
    assert main(["checkpoint", "inspect", str(path), "--json", "--tensors"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["whole"], found["step"], found["description"]["global_batch"]) == (True, 2, 8)
    assert found["parts"]["weights"] == {"tensors": 38, "values": 9190, "bytes": 36760}
    weights = weights_of(path)
    shown = {each["name"]: each["shape"] for each in found["tensors"] if each["name"].startswith("model.")}
    assert shown == {f"model.{name}": list(tensor.shape) for name, tensor in weights.items()}


def rewrite(checkpoint, **changes):
    """Change members of a checkpoint's description."""
    path = checkpoint / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut_file(checkpoint):
    file = max(checkpoint.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])


def drop_file(checkpoint):
    """Take a file away, and from the list of files."""
    file = max(checkpoint.glob("*.safetensors"))
    files = json.loads((checkpoint / "checkpoint.json").read_text())["files"]
    file.unlink()
    rewrite(checkpoint, files={name: size for name, size in files.items() if name != file.name})


def spoil_head(checkpoint):
    """Overwrite the head of a file, whose size stays."""
    file = max(checkpoint.glob("*.safetensors"))
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])


def other_model(checkpoint):
    """Have the description claim a wider feed-forward."""
    description = json.loads((checkpoint / "checkpoint.json").read_text())["description"]
    description["config"]["model"]["intermediate_size"] = 128
    rewrite(checkpoint, description=description)


def no_config(checkpoint):
    rewrite(checkpoint, description={"progress": {"updates": 2}})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_file, r"has \d+ bytes, \d+ were written"),
        (drop_file, r"missing: model\.\S+, .* and \d+ more"),
        (spoil_head, r"cannot be read: .*the checkpoint is damaged"),
        (other_model, r"contract\.weight is \[16, 64\], needed: \[16, 128\]"),
        (no_config, r"was saved by another release: it has none"),
    ],
)
def test_a_broken_checkpoint_is_told(newest, tmp_path, capsys, damage, message):
    """What is wrong is printed, the command fails, and nothing is exported from it."""
    damage(newest)
    assert main(["checkpoint", "inspect", str(newest)]) == 1
    out, err = capsys.readouterr()
    assert "not whole" in out.splitlines()[0]
    assert re.search(message, re.sub(r"\s+", " ", out)), out
    assert err == f"error: not whole: {newest}\n"
    assert main(["checkpoint", "export", str(newest), "--out", str(tmp_path / "out")]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]


@pytest.mark.parametrize("file_bytes", [2**30, 10_000], ids=["one", "several"])
def test_exported_weights_are_the_checkpoints(run, tmp_path, file_bytes):
    """Read back under transformers' names every weight has the same bits, from one file or from several."""
    path = run / "checkpoints" / "step-00000002"
    model = export_checkpoint(read_checkpoint(path), tmp_path / "out", file_bytes=file_bytes)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) == 1) == (file_bytes == 2**30)
    assert all(file.stat().st_size < file_bytes + 4096 for file in files)
    assert {file.stat().st_mode & 0o044 for file in files} == {0o044}
    exported = HuggingFaceWeights(tmp_path / "out", model)
    weights = weights_of(path)
    assert list(weights) != []
    assert weights.keys() == parameter_shapes(model).keys()
    for name, tensor in weights.items():
        assert torch.equal(exported.part(name, WHOLE, tensor.shape), tensor), name


def test_an_exported_model_opens_in_transformers(run, tmp_path, capsys):
    """The folder of the command is what transformers loads, in the number format that was asked for."""
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    assert main(["checkpoint", "export", str(run), "--out", str(out), "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out == f"BERT of step 2 in bf16: {out}\n"
    opened, report = transformers.BertForPreTraining.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ours = weights_of(run / "checkpoints" / "step-00000002")["0.word.weight"]
    assert torch.equal(opened.bert.embeddings.word_embeddings.weight, ours.to(torch.bfloat16))


def test_imported_weights_train_as_those_read_at_the_start(run, tmp_path, capsys):
    """A run resumed from an imported checkpoint makes the steps of one that reads the weights itself, bit for bit."""
    folder, exported = run.parent, tmp_path / "exported"
    export_checkpoint(read_checkpoint(run / "checkpoints" / "step-00000002"), exported, file_bytes=10_000)
    config = str(Path(__file__).parents[2] / "configs" / "bert-tiny.toml")
    words = [config, *small_overrides(folder), "--train.out", str(tmp_path / "imported")]
    assert main(["checkpoint", "import", str(exported), *words]) == 0
    checkpoint = tmp_path / "imported" / "checkpoints" / "step-00000000"
    assert capsys.readouterr().out.startswith(f"wrote {checkpoint}; ")
    assert main(["checkpoint", "inspect", str(checkpoint)]) == 0
    assert "adamw after 0 updates" in capsys.readouterr().out
    steps = {"train__steps": 1, "train__evaluation_samples": 0}
    imported = run_local(small_config(folder, train__out=tmp_path / "imported", **steps), resume=True)
    itself = run_local(small_config(folder, train__out=tmp_path / "itself", train__weights=exported, **steps))
    assert imported.last.loss == itself.last.loss
    one, other = weights_of(imported.checkpoint), weights_of(itself.checkpoint)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        ([], (2, r"holds a run already")),
        (["--train.out", "{}/new", "--model.num-layers", "3"], (1, r"not the weights of this model; missing: ")),
        (["--train.out", "{}/new", "--model.hidden-size", "32"], (1, r"weights of another size: 0\.word\.weight")),
        (["--train.out", "{}/new", "--train.weights", "x"], (2, r"weights = 'x' would be read at the start")),
    ],
)
def test_foreign_weights_are_refused(run, tmp_path, capsys, more, outcome):
    """Weights of another model, and a folder in use, are named; no file is left."""
    exported = tmp_path / "exported"
    export_checkpoint(read_checkpoint(run / "checkpoints" / "step-00000002"), exported, file_bytes=2**30)
    config = str(Path(__file__).parents[2] / "configs" / "bert-tiny.toml")
    words = [config, *small_overrides(run.parent), *(word.format(tmp_path) for word in more)]
    assert main(["checkpoint", "import", str(exported), *words]) == outcome[0]
    assert re.search(outcome[1], capsys.readouterr().err)
    assert not list(tmp_path.rglob("checkpoints/*"))


def test_nothing_is_overwritten(run, tmp_path, capsys):
    """A folder that is there stays as it is; wrong paths and sizes are named."""
    assert main(["checkpoint", "export", str(run), "--out", str(tmp_path)]) == 1
    assert "is there already; give a folder that is not" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="is there already"):
        export_checkpoint(read_checkpoint(run / "checkpoints" / "step-00000001"), tmp_path, file_bytes=100)
    assert main(["checkpoint", "export", str(run), "--out", str(tmp_path / "a"), "--file-gib", "0"]) == 2
    assert "--file-gib 0: needed: 0.001 to 1024 GiB" in capsys.readouterr().err
    assert main(["checkpoint", "inspect", str(tmp_path / "none")]) == 2
    assert "none does not exist; give the folder of a run" in capsys.readouterr().err
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 2
    assert "has neither checkpoint.json nor complete checkpoints" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_in_the_models_order(run):
    """Tensors go by the numbers of their layers, the weights before the moments' parts."""
    names = list(stored_tensors(read_checkpoint(run / "checkpoints" / "step-00000002")))
    numbers = [int(name.split(".")[1]) for name in names if name.startswith("model.")]
    assert numbers == sorted(numbers)
    assert names.index("model.2.attention.qkv.weight") < names.index("optimizer.exp_avg.0.word.weight")
