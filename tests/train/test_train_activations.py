"""Activations per rank before a run: against what the graphs of a running pipeline of that configuration keep."""

from pathlib import Path

import pytest
import torch

from chimera.runtime.halves import ForwardHalf
from chimera.runtime.pipeline import Pipeline
from chimera.tensor.parallel import TensorParallel
from chimera.tensor.vocabulary import Vocabulary
from chimera.train.activations import _field, peak_activation_bytes, stage_activations
from chimera.train.config_file import load_config
from chimera.train.families import family_of, layers_of
from chimera.train.layout import layout_of
from chimera.train.precision import torch_dtype

CONFIGS = Path(__file__).parents[2] / "configs"
TOLERANCE = 0.05


class Meter:
    """Bytes of the storages that graphs keep, while they keep them."""

    def __init__(self):
        self.holders, self.bytes, self.peak = {}, 0, 0
        self.weights = set()

    def hold(self, tensor):
        """Return what counts a tensor for as long as it lives."""
        storage = tensor.untyped_storage()
        return None if storage.data_ptr() in self.weights else Held(self, storage)


class Held:
    def __init__(self, meter, storage):
        self.meter, self.storage, self.key = meter, storage, storage.data_ptr()
        if meter.holders.setdefault(self.key, 0) == 0:
            meter.bytes += storage.nbytes()
            meter.peak = max(meter.peak, meter.bytes)
        meter.holders[self.key] += 1

    def __del__(self):
        self.meter.holders[self.key] -= 1
        if not self.meter.holders[self.key]:
            self.meter.bytes -= self.storage.nbytes()


def measured_peak(group, name, overrides):
    """Train one step on this rank and return the most bytes that were kept for backwards at once."""
    config = load_config(CONFIGS / f"{name}.toml", overrides)
    layout = layout_of(config)
    parallel = TensorParallel.join(group, config.parallel.tensor, sequence=config.parallel.sequence, timeout_s=60.0)
    with torch.device("meta"):
        layers = layers_of(config.model, parallel)
    loss = family_of(config.model).loss(Vocabulary(config.model.vocab_size, parallel))
    names = {*loss.fields, *(field for layer in layers for field in getattr(layer, "fields", ()))}
    pipe = Pipeline(
        layers,
        layout.schedule,
        loss,
        group,
        tensor=parallel,
        layer_to_stage=layout.layer_to_stage,
        recompute=config.schedule.recompute,
        recompute_layers=config.schedule.recompute_layers,
        dtype=torch_dtype(config.train.dtype),
        timeout_s=60.0,
    )
    fields = {field: _field(field, layout.microbatch_size, config.data) for field in names}
    batches = [fields] * layout.microbatches_per_run
    meter = Meter()
    meter.weights = {parameter.untyped_storage().data_ptr() for _, parameter in pipe.named_parameters()}
    meter.weights |= {field.untyped_storage().data_ptr() for field in fields.values()}
    end_piece, remade = ForwardHalf._end_piece, ForwardHalf.remade

    def ended(half, inputs, outputs):
        kept = (*inputs, *outputs) if half._graph else inputs
        half.__dict__.setdefault("held", []).extend(meter.hold(tensor) for tensor in kept)
        return end_piece(half, inputs, outputs)

    def made_again(half, piece):
        made = remade(half, piece)
        half.again = [meter.hold(tensor) for tensor in made.outputs]
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForwardHalf, "_end_piece", ended)
        patch.setattr(ForwardHalf, "remade", made_again)
        hooks = (lambda tensor: (meter.hold(tensor), tensor)), (lambda pair: pair[1])
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            pipe.step(batches, batches)
    pipe.close()
    return meter.peak


@pytest.mark.parametrize(
    ("name", "ranks_needed", "overrides"),
    [
        ("bert-tiny", 2, {}),
        ("gpt-tiny", 2, {"schedule.name": "1f1b"}),
        ("t5-tiny", 2, {"schedule.name": "1f1b", "parallel.cut": "count"}),
        ("ict-tiny", 2, {"schedule.name": "gpipe"}),
        ("gpt-tiny", 2, {"schedule.recompute": "full", "schedule.name": "1f1b"}),
        ("gpt-tiny", 2, {"schedule.recompute": "selective", "schedule.name": "1f1b", "train.dtype": "bf16"}),
        ("gpt-tiny", 2, {"model.attention_dropout": "0.1", "model.dropout": "0.1"}),
        ("gpt-tiny", 4, {"parallel.tensor": "2", "parallel.sequence": "true"}),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else str(value),
)
def test_activations_at_the_peak_are_known_before_a_run(ranks, name, ranks_needed, overrides):
    """Each rank's peak is within 5 % of what its graphs keep at the most in one step."""
    config = load_config(CONFIGS / f"{name}.toml", overrides)
    said = peak_activation_bytes(config, layout_of(config))
    for rank, peak in enumerate(ranks.run(ranks_needed, measured_peak, name, overrides)):
        assert peak == pytest.approx(said[config.grid.place(rank).pipeline], rel=TOLERANCE)


def test_recompute_keeps_what_the_papers_say():
    """Selective recompute drops the scores, 5·a·s²·b elements' bytes; full keeps the inputs of the layers alone."""
    held = {}
    for recompute in ("none", "selective", "full"):
        overrides = {"schedule.recompute": recompute, "model.attention_dropout": "0.1", "parallel.pipeline": "1"}
        config = load_config(CONFIGS / "gpt-tiny.toml", overrides | {"schedule.name": "1f1b"})
        (stage,) = stage_activations(config, layout_of(config))
        held[recompute] = stage.held
    b, s = layout_of(config).microbatch_size, config.data.sequence_length
    h, a, layers = config.model.hidden_size, config.model.num_heads, config.model.num_layers
    scores = layers * b * a * s * s * (4 + 4 + 1)  # softmax and what is left of it in fp32, and the mask
    assert held["none"] - held["selective"] == pytest.approx(scores, rel=TOLERANCE)
    assert held["full"] == (layers + 1) * b * s * h * 4
