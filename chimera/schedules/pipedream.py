"""PipeDream and PipeDream-2BW: asynchronous schedules, which update the weights without draining the pipeline.

The module knows the order of one rank and where its updates stand. It refuses to know costs and messages, and what an
update does with gradients of older weights; a stage keeps the weights of a forward until its backward.
"""

from dataclasses import replace

from chimera.errors import UsageError
from chimera.ir.action import Action, Instruction, Kind
from chimera.ir.collector import collector_paused
from chimera.ir.schedule import Schedule
from chimera.schedules.building import linear, nearest, require_counts
from chimera.schedules.one_f_one_b import program_1f1b

__all__ = ["pipedream", "pipedream_2bw"]


def pipedream(ranks: int, microbatches: int) -> Schedule:
    """Build PipeDream (asynchronous): 1F1B in which every backward is followed by an update of its stage.

    >>> for row in pipedream(2, 3).to_text():
    ...     print(row)
    0F0 0F1 0B0 0REDUCE_GRAD 0STEP 0F2 0B1 0REDUCE_GRAD 0STEP 0B2 0REDUCE_GRAD 0STEP
    1F0 1B0 1REDUCE_GRAD 1STEP 1F1 1B1 1REDUCE_GRAD 1STEP 1F2 1B2 1REDUCE_GRAD 1STEP

    The program has ``microbatches`` updates, with one warm-up and one drain. The forward of micro-batch j on rank r
    takes the newest weights there, those after max(0, j − (p − r − 1)) updates, and its backward the same ones: the
    paper's weight stashing, without its vertical sync.

    Bubble: (p−1)/(m+p−1) of the total time of all m updates, so none in the long run. Activations: min(m, p − rank),
    in units of one stage's activations of one micro-batch. Weights: p − rank versions if m ≥ 2(p − rank) − 2, else
    fewer. Works for any p and m ≥ 1.

    Source: Narayanan et al., PipeDream, SOSP 2019 (arXiv 1806.03377), §3.

    Args:
        ranks: pipeline ranks p, one stage each.
        microbatches: micro-batches m of the program, with one update each.

    Raises:
        UsageError: a count is below 1.
    """
    require_counts("pipedream", ranks=ranks, microbatches=microbatches)
    return _updating("pipedream", ranks, microbatches, each=1)


def pipedream_2bw(ranks: int, microbatches: int, updates: int | None = None) -> Schedule:
    """Build PipeDream-2BW (asynchronous): 1F1B with an update after every m/k micro-batches, k = ``updates``.

    >>> for row in pipedream_2bw(2, 4, updates=2).to_text():
    ...     print(row)
    0F0 0F1 0B0 0F2 0B1 0REDUCE_GRAD 0STEP 0F3 0B2 0B3 0REDUCE_GRAD 0STEP
    1F0 1B0 1F1 1B1 1REDUCE_GRAD 1STEP 1F2 1B2 1F3 1B3 1REDUCE_GRAD 1STEP

    All micro-batches of group g take the weights after max(0, g − 1) updates on every stage, so that the delay is one
    update everywhere: w(t+1) = w(t) − ν·∇f(w(t−1)). With m/k ≥ p no micro-batch in flight is older than the group
    before, so two versions of the weights suffice.

    Bubble: (p−1)/(m+p−1) of the total time of all k updates, so none in the long run. Activations: min(m, p − rank),
    in units of one stage's activations of one micro-batch. Weights: 2 versions, 1 if k = 1. Works for any p and m; k
    divides m, and m/k ≥ p unless k = 1.

    Source: Narayanan et al., PipeDream-2BW, ICML 2021 (arXiv 2006.09503), §3.

    Args:
        ranks: pipeline ranks p, one stage each.
        microbatches: micro-batches m of the program, over all updates.
        updates: updates k; as many as can be without.

    Raises:
        UsageError: a count is below 1, k does not divide m, or a group is smaller than p; with the nearest k.
    """
    require_counts("pipedream-2bw", ranks=ranks, microbatches=microbatches)
    legal = [k for k in range(1, microbatches // ranks + 1) if microbatches % k == 0] or [1]
    if updates is None:
        updates = legal[-1]
    require_counts("pipedream-2bw", updates=updates)
    if updates not in legal:
        raise UsageError(
            f"pipedream-2bw: got --updates {updates} with --microbatches {microbatches} and --ranks {ranks}; needed: a "
            f"divisor of the micro-batches that leaves at least ranks to each update; try --updates "
            f"{nearest(updates, legal)}"
        )
    each = microbatches // updates
    version = tuple(max(0, j // each - 1) for j in range(microbatches))
    return replace(_updating("pipedream-2bw", ranks, microbatches, each), microbatch_to_version=version)


def _updating(name: str, ranks: int, microbatches: int, each: int) -> Schedule:
    """Build 1F1B with a reduction and an update behind every ``each``-th backward of a stage."""
    with collector_paused():
        programs: list[tuple[Instruction, ...]] = []
        for rank in range(ranks):
            update = (Action(Kind.REDUCE_GRAD, rank, None), Action(Kind.STEP, rank, None))
            program: list[Instruction] = []
            for kind, stage, microbatch in program_1f1b(ranks, rank, microbatches):
                program.append(Action(kind, stage, microbatch))
                if kind is Kind.B and microbatch is not None and (microbatch + 1) % each == 0:
                    program.extend(update)
            programs.append(tuple(program))
    return Schedule(name, linear(ranks), (0,) * microbatches, tuple(programs))
