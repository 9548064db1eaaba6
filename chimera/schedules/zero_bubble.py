"""Zero-bubble schedules by hand: 1F1B and interleaved with the backward split, the weight gradients held back.

I runs in B's place, so a gradient reaches the rank before it sooner; W waits for the bubbles of the drain. How many W a
rank holds back is all that is decided here. The module refuses to know costs, messages and reductions.
"""

from collections import deque
from collections.abc import Iterable

from chimera.ir.action import Action, Kind
from chimera.ir.collector import collector_paused
from chimera.ir.schedule import Schedule
from chimera.schedules.building import actions, linear, merge_1f1b, require_counts
from chimera.schedules.interleaved import interleaved_program, microbatch_groups

__all__ = ["interleaved_zb", "zb_h1", "zb_h2"]


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-H1: 1F1B with split backward, in which rank r holds back r weight gradients.

    >>> for row in zb_h1(4, 5).to_text():
    ...     print(row)
    0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4
    1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1I3 1W2 1I4 1W3 1W4
    2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2I4 2W2 2W3 2W4
    3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3W2 3W3 3W4

    Bubble, on the span's clock: (p−1)(F+I−W) of time per step for m ≥ p, W ≤ F and W ≤ I; the makespan is the same.
    With a time of c per hop it is 4(p−1)c more. Activations: min(m, p) on every rank, in units of one stage's
    activations of one micro-batch, which is 1F1B's most. Works for any p ≥ 1 and m ≥ 1.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), §2.

    Args:
        ranks: pipeline ranks p, one stage each.
        microbatches: micro-batches m per step.

    Raises:
        UsageError: a count is below 1.
    """
    return _zb_h("zb-h1", ranks, microbatches, ahead=1)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-H2: ZB-H1 with twice the forwards ahead and twice the weight gradients held back.

    >>> for row in zb_h2(3, 6).to_text():
    ...     print(row)
    0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
    1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5
    2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5

    Bubble, on the span's clock: (p−1)(F+I−2W) of time per step for m ≥ 2p − 1 and 2W ≤ F + I, nothing at
    F = I = W. With a time of c per hop it is 2(p−1)c more. The last rank still starts p − 1 forwards late, so the
    makespan is no shorter than m(F+I+W) + (p−1)F: the gain is there where a step may start before the one before it
    has ended everywhere. Activations: min(m, 2p − 1) on every rank, in units of one stage's activations of one
    micro-batch. Works for any p ≥ 1 and m ≥ 1.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), §2.

    Args:
        ranks: pipeline ranks p, one stage each.
        microbatches: micro-batches m per step.

    Raises:
        UsageError: a count is below 1.
    """
    return _zb_h("zb-h2", ranks, microbatches, ahead=2)


def _zb_h(name: str, ranks: int, microbatches: int, ahead: int) -> Schedule:
    """Build either: ``ahead`` forwards per rank that follows, ``ahead`` weight gradients held back per rank before."""
    require_counts(name, ranks=ranks, microbatches=microbatches)
    with collector_paused():
        programs = []
        for rank in range(ranks):
            stages = [rank] * microbatches
            forwards = actions(Kind.F, stages, range(microbatches))
            input_grads = actions(Kind.I, stages, range(microbatches))
            merged = merge_1f1b(forwards, input_grads, warmup=ahead * (ranks - rank - 1))
            programs.append(_with_weight_grads(merged, held_back=ahead * rank))
    return Schedule(name, linear(ranks), (0,) * microbatches, tuple(programs))


def interleaved_zb(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Build the interleaved zero-bubble schedule: interleaved with split backward, W held back as in ZB-H1.

    >>> for row in interleaved_zb(2, 2, chunks=2).to_text():
    ...     print(row)
    0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

    It runs (p − rank − 1) + (v − 1)p forwards before it alternates, half the distance between ranks that interleaved
    keeps, because an I is half a B. Rank r holds back r weight gradients. With v = 1 this is ZB-H1.

    Bubble, on the span's clock: (p−1)(F+I−W)/v of time per step, for m a multiple of p, W ≤ F and W ≤ I; the makespan
    is the same. Activations: p on every rank for m a multiple of p, in units of 1/p of the model for one micro-batch.
    Works for any p, v and m ≥ 1; where p does not divide m, in the groups that interleaved makes.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), §2, on the order of Narayanan et
    al., SC 2021 (arXiv 2104.04473), §2.2.2.

    Args:
        ranks: pipeline ranks p.
        microbatches: micro-batches m per step.
        chunks: model chunks v per rank.

    Raises:
        UsageError: a count is below 1.
    """
    require_counts("interleaved-zb", ranks=ranks, microbatches=microbatches, chunks=chunks)
    # With one chunk nothing is gained by groups: every rank runs all micro-batches in order.
    groups = [[*range(microbatches)]] if chunks == 1 else microbatch_groups(ranks, microbatches)
    ahead = (chunks - 1) * len(groups[0])
    with collector_paused():
        programs = tuple(
            _with_weight_grads(
                interleaved_program(
                    ranks,
                    rank,
                    groups,
                    chunks,
                    backward=Kind.I,
                    warmup=ranks - rank - 1 + ahead,
                ),
                held_back=rank,
            )
            for rank in range(ranks)
        )
    return Schedule("interleaved-zb", linear(ranks, chunks), (0,) * microbatches, programs)


def _with_weight_grads(program: Iterable[Action], held_back: int) -> tuple[Action, ...]:
    """Put a W behind each I, that of the I ``held_back`` places before; what is left runs at the end.

    >>> ordered = _with_weight_grads(actions(Kind.I, [1] * 3, range(3)), held_back=1)
    >>> " ".join(map(str, ordered))
    '1I0 1I1 1W0 1I2 1W1 1W2'
    """
    ordered: list[Action] = []
    waiting: deque[Action] = deque()
    for action in program:
        ordered.append(action)
        if action.kind is Kind.I:
            waiting.append(Action(Kind.W, action.stage, action.microbatch))
            if len(waiting) > held_back:
                ordered.append(waiting.popleft())
    return (*ordered, *waiting)
