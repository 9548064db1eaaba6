"""Bytes per rank before a run: against what a running pipeline of the same configuration holds."""

import pytest
import torch
from small_runs import small_config

from chimera.models import BertPretrainingLoss, bert_layers
from chimera.runtime.pipeline import Pipeline
from chimera.tensor.parallel import TensorParallel
from chimera.train.evaluation import CountingLoss
from chimera.train.layout import layout_of
from chimera.train.memory import bytes_per_rank
from chimera.train.optimizers import build_optimizer
from chimera.train.precision import torch_dtype


def layers_of(config, parallel=None):
    parallel = parallel or TensorParallel(0, config.parallel.tensor, config.parallel.sequence)
    with torch.device("meta"):
        return bert_layers(config.model, parallel)


def held(group, folder, overrides):
    """Return bytes of weights, of gradients, and of originals and moments after an update of zero gradients."""
    config = small_config(folder, **overrides)
    layout = layout_of(config)
    parallel = TensorParallel.join(group, config.parallel.tensor, sequence=config.parallel.sequence, timeout_s=20.0)
    pipe = Pipeline(
        layers_of(config, parallel),
        layout.schedule,
        CountingLoss(BertPretrainingLoss()),
        group,
        tensor=parallel,
        layer_to_stage=layout.layer_to_stage,
        dtype=torch_dtype(config.train.dtype),
        shard_optimizer=config.parallel.shard_optimizer,
        bucket_bytes=config.bucket_bytes,
        timeout_s=20.0,
    )
    optimizer = build_optimizer(config.optimizer, pipe.portions(), sums=pipe.sum_over_portions)
    optimizer.step()
    weights = storages(parameter for _, parameter in pipe.named_parameters())
    gradients = storages(portion.parameter.grad for portion in pipe.portions())
    originals = storages(parameter for _, parameter in pipe.optimizer_parameters())
    moments = storages(value for state in optimizer.state.values() for value in state.values() if value.ndim)
    pipe.close()
    kept = {key: size for key, size in (originals | moments).items() if key not in weights}
    return sum(weights.values()), sum(gradients.values()), sum(kept.values())


def storages(tensors):
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize(
    ("ranks_needed", "overrides"),
    [
        (2, {}),
        (2, {"parallel__shard_optimizer": "true", "train__dtype": "bf16"}),
        (4, {"parallel__shard_optimizer": "true", "parallel__data": 2, "optimizer__name": "lamb"}),
        (2, {"schedule__name": "1f1b", "train__dtype": "fp16", "optimizer__name": "sgd"}),
        (4, {"parallel__tensor": 2, "parallel__sequence": "true", "parallel__shard_optimizer": "true"}),
        (8, {"parallel__tensor": 4, "schedule__name": "1f1b", "train__dtype": "bf16"}),
        (
            4,
            {
                "schedule__name": "1f1b",
                "parallel__data": 2,
                "parallel__shard_optimizer": "true",
                "model__tied_decoder": "true",
            },
        ),
    ],
    ids=lambda value: " ".join(f"{name}={v}" for name, v in value.items()) if isinstance(value, dict) else str(value),
)
def test_the_bytes_of_a_run_are_known_before_it(ranks, tmp_path, ranks_needed, overrides):
    """Weights, gradients and what the optimizer keeps are within 2% of what is said before, on every rank."""
    sizes = {"model__hidden_size": 64, "model__num_heads": 4} | overrides
    config = small_config(tmp_path, **sizes)
    said = bytes_per_rank(config, layout_of(config), layers_of(config))
    for rank, (weights, gradients, optimizer) in enumerate(ranks.run(ranks_needed, held, tmp_path, sizes)):
        expected = said[config.grid.place(rank).pipeline]
        assert weights == pytest.approx(expected.parameters, rel=0.02)
        assert gradients == pytest.approx(expected.gradients, rel=0.02)
        assert optimizer == pytest.approx(expected.optimizer, rel=0.02)


def test_sharding_saves_the_published_share(tmp_path):
    """bf16 with AdamW keeps 18 bytes per parameter, 6 + 12 / (2 · d) where two routes and d replicas share."""
    sizes = {"model__hidden_size": 256, "model__num_heads": 4, "train__dtype": "bf16", "model__tied_decoder": "false"}
    plain, sharded = (
        small_config(tmp_path, **sizes, parallel__data=2, parallel__shard_optimizer=flag) for flag in ("false", "true")
    )
    parameters = sum(p.numel() for layer in layers_of(plain) for p in layer.parameters())
    for config, expected in ((plain, 18.0), (sharded, 6.0 + 12.0 / 4)):
        said = bytes_per_rank(config, layout_of(config), layers_of(config))
        assert [rank.total for rank in said] == pytest.approx([parameters * expected] * 2, rel=0.02)
