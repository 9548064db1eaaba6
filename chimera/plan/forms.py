"""Closed forms per schedule: the idle time, the activations and the weights of a step, without building it.

They rank candidates by the hundred thousand; what remains is simulated. The formulas are those that ``schedules``
quotes from the papers, for equal stages, on the clock of the makespan. Numbers and columns alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import numpy as np

from chimera.errors import UsageError, nearest_names
from chimera.plan.dims import Number

__all__ = ["FORMS", "ClosedForm", "FormSizes", "closed_form"]


class FormSizes(NamedTuple):
    """p, m, v (or 2 w), f, and the times of 1/p of the model for one micro-batch."""

    ranks: Number
    microbatches: Number
    chunks: Number
    pairs: Number
    forward: Number
    input_grad: Number
    weight_grad: Number

    @property
    def backward(self) -> Number:
        """Time of B."""
        return self.input_grad + self.weight_grad

    @property
    def total(self) -> Number:
        """Time of F and B."""
        return self.forward + self.backward


_Ends = Literal["apart", "together", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """One schedule.

    Attributes:
        bubble: idle time of a step.
        activations: at the peak of a rank, in units of 1/p of the model for one micro-batch.
        copies: of the weights on a rank.
        hops: messages in a row that a step waits for, once.
        steady_hops: messages that every micro-batch waits for on the ranks before the last (Qi et al. 2024: with a
            hop as latency 1F1B takes 2(p−1)/p of them).
        ends: whether one rank has the first stage and another the last, one rank both, or two ranks half of each.
    """

    bubble: Callable[[FormSizes], Number]
    activations: Callable[[FormSizes], Number]
    copies: Callable[[FormSizes], Number] = lambda _: 1.0
    hops: Callable[[FormSizes], Number] = lambda x: 2 * (x.ranks - 1)
    steady_hops: Callable[[FormSizes], Number] = lambda _: 0.0
    ends: _Ends = "apart"


def _up_to(limit: Callable[[FormSizes], Number]) -> Callable[[FormSizes], Number]:
    return lambda x: np.minimum(x.microbatches, limit(x))


def _hops_1f1b(x: FormSizes) -> Number:
    return np.maximum(2 * (x.ranks - 1) - 2, 0.0)


def _steady_1f1b(x: FormSizes) -> Number:
    """Return the hops of 1F1B that a rank's period waits for: its round trip, over the micro-batches in flight."""
    return 2 * (x.ranks - 1) / x.ranks


def _hops_interleaved(x: FormSizes) -> Number:
    looped = np.maximum(2 * (x.ranks * x.chunks - 1) - x.ranks, 0.0)
    hops: Number = np.where(np.asarray(x.chunks) > 1, looped, _hops_1f1b(x))
    return hops


def _steady_interleaved(x: FormSizes) -> Number:
    hops: Number = np.where(np.asarray(x.chunks) > 1, 0.0, _steady_1f1b(x))
    return hops


def _bubble_chimera(x: FormSizes) -> Number:
    """Return the idle time of units of p micro-batches in a row (Li and Hoefler 2021, §3.5, for the first)."""
    per_unit = np.maximum(x.ranks / x.pairs - 2, 0.0)
    more_units = np.maximum(np.ceil(x.microbatches / x.ranks) - 1, 0.0)
    bubble: Number = per_unit * (x.backward + more_units * np.maximum(x.backward - x.forward, 0.0))
    return bubble


def _bubble_gems(x: FormSizes) -> Number:
    whole = x.microbatches * x.ranks * x.backward + (x.ranks + x.microbatches - 1) * x.forward
    return whole - x.microbatches * x.total


_ONE_PIPELINE: Final = ClosedForm(
    bubble=lambda x: (x.ranks - 1) * x.total,
    activations=_up_to(lambda x: x.ranks),
    hops=_hops_1f1b,
    steady_hops=_steady_1f1b,
)

FORMS: Final[Mapping[str, ClosedForm]] = MappingProxyType(
    {
        "gpipe": ClosedForm(bubble=_ONE_PIPELINE.bubble, activations=lambda x: x.microbatches),
        "1f1b": _ONE_PIPELINE,
        "interleaved": ClosedForm(
            bubble=lambda x: (x.ranks - 1) * x.total / x.chunks,
            activations=lambda x: np.minimum(
                x.microbatches, x.ranks + np.where(np.asarray(x.chunks) > 1, (x.ranks - 1) / x.chunks, 0.0)
            ),
            hops=_hops_interleaved,
            steady_hops=_steady_interleaved,
        ),
        "chimera": ClosedForm(
            bubble=_bubble_chimera,
            activations=_up_to(lambda x: x.ranks),
            copies=lambda x: 2 * x.pairs,
            ends="shared",
        ),
        "chimera-zb": ClosedForm(
            bubble=lambda x: np.maximum(x.ranks / (2 * x.pairs) - 1, 0.0) * x.forward,
            activations=_up_to(lambda x: x.ranks),
            copies=lambda x: 2 * x.pairs,
            ends="shared",
        ),
        "looped-bfs": ClosedForm(
            bubble=lambda x: (x.ranks - 1) * x.total / x.chunks, activations=lambda x: x.microbatches
        ),
        "hanayo": ClosedForm(
            bubble=lambda x: (x.ranks - 1) * x.total / x.chunks,
            activations=_up_to(lambda x: x.ranks),
            ends="together",
        ),
        "bitpipe": ClosedForm(
            bubble=lambda x: np.maximum(x.ranks - 2, 0.0) * x.total / (2 * x.chunks),
            activations=_up_to(lambda x: x.ranks),
            copies=lambda _: 2.0,
            ends="shared",
        ),
        "gems": ClosedForm(bubble=_bubble_gems, activations=lambda _: 1.0, copies=lambda _: 2.0, ends="shared"),
        "zb-h1": ClosedForm(
            bubble=lambda x: (x.ranks - 1) * np.maximum(x.forward + x.input_grad - x.weight_grad, x.forward),
            activations=_up_to(lambda x: x.ranks),
            hops=lambda x: 4 * (x.ranks - 1),
        ),
        "zb-h2": ClosedForm(
            bubble=lambda x: (x.ranks - 1) * np.maximum(x.forward + x.input_grad - 2 * x.weight_grad, x.forward),
            activations=_up_to(lambda x: 2 * x.ranks - 1),
        ),
        # At most as long as those made by hand, whatever the costs.
        "zb-1p": ClosedForm(
            bubble=lambda x: (x.ranks - 1) * np.maximum(x.forward + x.input_grad - x.weight_grad, x.forward),
            activations=_up_to(lambda x: x.ranks),
            hops=lambda x: 4 * (x.ranks - 1),
        ),
        "zb-2p": ClosedForm(
            bubble=lambda x: (x.ranks - 1) * np.maximum(x.forward + x.input_grad - 2 * x.weight_grad, x.forward),
            activations=_up_to(lambda x: 2 * x.ranks),
        ),
        "interleaved-zb": ClosedForm(
            bubble=lambda x: (x.ranks - 1) * np.maximum(x.forward + x.input_grad - x.weight_grad, x.forward) / x.chunks,
            activations=_up_to(lambda x: x.ranks),
        ),
        "zb-v": ClosedForm(
            bubble=lambda x: (x.ranks - 1) * x.forward / 2, activations=_up_to(lambda x: x.ranks), ends="together"
        ),
        "v-half": ClosedForm(
            bubble=lambda x: (x.ranks - 1) * x.total / 2,
            activations=_up_to(lambda x: np.floor((x.ranks + 2) / 2)),
            ends="together",
        ),
        "v-min": ClosedForm(
            bubble=lambda x: (x.ranks - 1) * x.total * 2 / 3,
            activations=_up_to(lambda x: np.floor((x.ranks + 4) / 3)),
            ends="together",
        ),
        "dualpipe": ClosedForm(
            bubble=lambda x: (
                np.maximum(x.ranks / 2 - 1, 0.0) * np.maximum(x.total + x.backward - 3 * x.weight_grad, x.forward)
            ),
            activations=lambda x: x.ranks + 1,
            copies=lambda _: 2.0,
            ends="shared",
        ),
        "dualpipev": ClosedForm(
            bubble=lambda x: (x.ranks - 1) / 2 * np.maximum(x.total + x.backward - 3 * x.weight_grad, x.forward),
            activations=lambda x: x.ranks + 0.5,
            ends="together",
        ),
        "pipedream": ClosedForm(
            bubble=_ONE_PIPELINE.bubble,
            activations=_ONE_PIPELINE.activations,
            copies=lambda x: np.minimum(x.microbatches, x.ranks),
            hops=_hops_1f1b,
            steady_hops=_steady_1f1b,
        ),
        "pipedream-2bw": ClosedForm(
            bubble=_ONE_PIPELINE.bubble,
            activations=_ONE_PIPELINE.activations,
            copies=lambda _: 2.0,
            hops=_hops_1f1b,
            steady_hops=_steady_1f1b,
        ),
    }
)
"""The closed form of every schedule of the registry."""


def closed_form(schedule: str) -> ClosedForm:
    """Return the closed form of a schedule.

    Raises:
        UsageError: no schedule has this name.
    """
    if schedule not in FORMS:
        raise UsageError(
            f"no schedule is named {schedule!r}{nearest_names(schedule, FORMS)}; known: {', '.join(FORMS)}"
        )
    return FORMS[schedule]
