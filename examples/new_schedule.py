"""A new schedule as a pure function, compared with 1F1B.

    python examples/new_schedule.py

Eager 1F1B (Zhuang et al., MLSys 2023, arXiv 2211.05322, §4) runs about twice the warm-up forwards of 1F1B. A message
then has a whole forward and backward of time before anyone waits for it; the price is memory for more micro-batches.
"""

import chimera
from chimera.ir.action import Kind
from chimera.ir.checks import check
from chimera.schedules.building import actions, linear, merge_1f1b


def eager_1f1b(ranks: int, microbatches: int) -> chimera.Schedule:
    """Build eager 1F1B: 2(p − rank − 1) warm-up forwards, then forward and backward in turn."""
    programs = []
    for rank in range(ranks):
        forwards = actions(Kind.F, [rank] * microbatches, range(microbatches))
        backwards = actions(Kind.B, [rank] * microbatches, range(microbatches))
        programs.append(tuple(merge_1f1b(forwards, backwards, warmup=2 * (ranks - rank - 1))))
    return chimera.Schedule("eager 1f1b", linear(ranks), (0,) * microbatches, tuple(programs))


def main() -> None:
    """Print both schedules' makespan, idle share and memory for messages of three lengths."""
    schedules = [chimera.build_schedule("1f1b", ranks=4, microbatches=16), eager_1f1b(4, 16)]
    print("message time  schedule    makespan   idle  peak activations")
    for p2p in (0.0, 0.25, 0.5):
        for schedule in schedules:
            check(schedule)
            timeline = chimera.simulate(schedule, chimera.Costs(forward=1.0, backward=2.0, p2p=p2p))
            print(
                f"{p2p:12.2f}  {schedule.name:10}  {timeline.makespan:8g}  {timeline.bubble_fraction:5.1%}  "
                f"{max(timeline.peak_activations):16g}"
            )


if __name__ == "__main__":
    main()
