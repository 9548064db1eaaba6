"""Which single choice, relaxed, would make something fit: asked of the bounds, and told in the options' words."""

from collections.abc import Iterator
from dataclasses import replace

from chimera.plan.search.bounded import least_bytes
from chimera.plan.search.model_pricing import ModelPricing
from chimera.plan.search.space import SearchSpace

__all__ = ["relaxations"]

_MORE_DEVICES = (2, 4, 8, 16, 32)


def relaxations(pricing: ModelPricing, space: SearchSpace, global_batch: int) -> list[str]:
    """Return the changes of one choice after which a layout fits by its bound."""
    found = [
        f"--{name.replace('_', '-')} left to the search"
        for name in space.given
        if _fits(pricing, replace(space, **{name: None}), global_batch)
    ]
    return [*found, *_devices(pricing, space, global_batch)]


def _devices(pricing: ModelPricing, space: SearchSpace, global_batch: int) -> Iterator[str]:
    """Yield the fewest devices that fit, in whole nodes."""
    cluster = pricing.cluster
    for times in _MORE_DEVICES:
        larger = replace(cluster, num_devices=-(-cluster.num_devices // cluster.node_size) * cluster.node_size * times)
        if _fits(replace(pricing, cluster=larger), space, global_batch):
            yield f"--gpus {larger.num_devices}"
            return


def _fits(pricing: ModelPricing, space: SearchSpace, global_batch: int) -> bool:
    least = least_bytes(pricing.shape, pricing.cluster, pricing, global_batch=global_batch, space=space)
    return least <= pricing.cluster.device.memory_bytes
