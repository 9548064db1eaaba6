"""A schedule written by hand, proved, simulated and drawn.

    python examples/schedule_by_hand.py

Two ranks hold both stages each. Micro-batches 0 and 1 go down the ranks and 2 and 3 go up, so that each direction fills
the other one's idle time.
"""

import chimera
from chimera.errors import ScheduleError
from chimera.ir.checks import check
from chimera.timeline import draw_grid

DOWN, UP = [0, 1], [1, 0]  # the rank of each stage


def both_ways(*programs: str) -> chimera.Schedule:
    """Read one program per rank; ``3F0`` is the forward of stage 3 for micro-batch 0."""
    return chimera.Schedule.from_text(programs, routes=[DOWN, UP], microbatch_to_route=[0, 0, 1, 1], name="by hand")


def main() -> None:
    """Show a good schedule, then what the proof says of a bad one."""
    schedule = both_ways(
        "0F0 1F2 1B2 0F1 1F3 1B3 0B0 0B1",
        "0F2 1F0 1B0 0F3 1F1 1B1 0B2 0B3",
    )
    check(schedule)
    timeline = chimera.simulate(schedule, chimera.Costs(forward=1.0, backward=2.0))
    print(draw_grid(timeline).plain())
    print(f"makespan {timeline.makespan:g}, idle {timeline.bubble_fraction:.1%}")

    stuck = both_ways(
        "1F2 0F0 1B2 0F1 1F3 1B3 0B0 0B1",
        "1F0 0F2 1B0 0F3 1F1 1B1 0B2 0B3",
    )
    try:
        check(stuck)
    except ScheduleError as error:
        print(f"\nrefused: {error}")


if __name__ == "__main__":
    main()
