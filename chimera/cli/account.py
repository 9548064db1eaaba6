"""What the time of a run went into, in words: the last lines of ``chimera train`` and the first of ``chimera top``."""

from collections.abc import Sequence

from chimera.train.tracking.record import RunRecord

__all__ = ["account", "duration", "tracker_lines"]


def account(record: RunRecord) -> str:
    """Return how the time since the first start was spent, and how long the first step took to come."""
    shares = [
        f"{record.total(name) / record.wall_s:.1%} {what}"
        for name, what in (
            ("evaluation_s", "evaluation"),
            ("checkpoint_s", "checkpoints"),
            ("data_wait_s", "waiting for data"),
        )
        if record.wall_s and record.total(name) >= record.wall_s / 2000
    ]
    restarts = len(record.starts) - 1
    parts = [
        f"{record.effective_share:.1%} of {duration(record.wall_s)} in steps that stand"
        + (f" ({', '.join(shares)})" if shares else "")
    ]
    if record.starts[0].first_step_s is not None:
        parts.append(f"first step after {duration(record.starts[0].first_step_s)}")
    if restarts:
        parts.append(f"{restarts} restart{'s' * (restarts > 1)}")
    return "; ".join(parts)


def tracker_lines(record: RunRecord) -> Sequence[str]:
    """Return a line for each tracker that failed."""
    return [
        f"{name} lost {each.lost_rows:,} row{'s' * (each.lost_rows != 1)}; it failed first at {each.first_failure}"
        for name, each in record.trackers.items()
        if each.first_failure is not None
    ]


def duration(seconds: float) -> str:
    """Return a time as people say it.

    >>> [duration(seconds) for seconds in (0.21, 12.34, 75, 3_700, 200_000)]
    ['0.21 s', '12.3 s', '1 min 15 s', '1 h 1 min', '55 h 33 min']
    """
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
