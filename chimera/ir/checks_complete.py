"""The first questions to a schedule: are its indices in range, is each computation there once, and on the right rank.

What later checks take for granted is settled here. It knows nothing of order, messages or memory.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import BACKWARDS, COMPUTATIONS, WHOLE_STAGE, Action, Kind, Overlap
from chimera.ir.rows import NOTHING, code_mask
from chimera.ir.schedule import Schedule
from chimera.ir.table import NO_MICROBATCH
from chimera.ir.violation import Violation, violation_at

__all__ = ["completeness", "placement", "repeated_rows", "shape"]

_LISTABLE = 10_000
"""Above this many (stage, micro-batch) cells a schedule that lacks more than half of them is refused as a whole."""


def shape(schedule: Schedule) -> list[Violation]:
    """Check stage and micro-batch numbers, pairs, and that whole-stage actions stand where the stage lives."""
    return [*_numbers(schedule), *_pairs(schedule)]


def _numbers(schedule: Schedule) -> Iterator[Violation]:
    table, num_stages, num_microbatches = schedule.table, schedule.num_stages, schedule.num_microbatches
    whole = code_mask(table, *WHOLE_STAGE)
    bad_stage = (table.stage < 0) | (table.stage >= num_stages)
    for row in np.flatnonzero(bad_stage).tolist():
        yield violation_at(table, row, "shape", f"there is no such stage; needed: a stage in 0…{num_stages - 1}")
    for row in np.flatnonzero(whole & (table.microbatch != NO_MICROBATCH)).tolist():
        yield violation_at(table, row, "shape", "it concerns the whole stage; leave the micro-batch out")
    outside = ~whole & ((table.microbatch < 0) | (table.microbatch >= num_microbatches))
    for row in np.flatnonzero(outside).tolist():
        needed = f"a micro-batch in 0…{num_microbatches - 1}" if num_microbatches else "at least one micro-batch"
        yield violation_at(table, row, "shape", f"there is no such micro-batch; needed: {needed}")


def _pairs(schedule: Schedule) -> Iterator[Violation]:
    if not schedule.table.paired.any():
        return
    for rank, program in enumerate(schedule.actions):
        for position, instruction in enumerate(program):
            if type(instruction) is Overlap and (fault := instruction.fault) is not None:
                yield Violation(rank, position, str(instruction), fault, "shape")


def placement(schedule: Schedule) -> list[Violation]:
    """Check that each action stands on the rank its micro-batch's route says, or on one that holds its stage."""
    table = schedule.table
    routes = np.array(schedule.placement.routes, np.int32)
    route = np.array(schedule.microbatch_to_route, np.int32)
    rank, whole = table.rank, code_mask(table, *WHOLE_STAGE)
    home = np.where(whole, rank, 0)
    single = np.flatnonzero(~whole)
    home[single] = routes[route[table.microbatch[single]], table.stage[single]]
    found = [
        violation_at(
            table,
            row,
            "placement",
            f"route {route[table.microbatch[row]]} of micro-batch {table.microbatch[row]} runs "
            f"stage {table.stage[row]} on rank {home[row]}; move it there",
        )
        for row in np.flatnonzero(home != rank).tolist()
    ]
    holders = [frozenset(ranks.tolist()) for ranks in routes.T]
    for row in np.flatnonzero(whole).tolist():
        stage = int(table.stage[row])
        if int(rank[row]) not in holders[stage]:
            where = ", ".join(map(str, sorted(holders[stage])))
            found.append(
                violation_at(table, row, "placement", f"this rank does not hold stage {stage}; its replicas: {where}")
            )
    return found


def completeness(schedule: Schedule, *, forward_only: bool) -> list[Violation]:
    """Check that each (stage, micro-batch) has one F and one B, or one I and one W; if forward only, just one F."""
    table = schedule.table
    size = schedule.num_stages * schedule.num_microbatches
    if size == 0:
        return [Violation(0, 0, "program", "the schedule has no micro-batch; give it at least one", "complete")]
    present = int(code_mask(table, Kind.F).sum())
    if present < size // 2 and size > _LISTABLE:
        # One sentence says more than a list, and a small hostile file that claims many stages and micro-batches does
        # not get their product allocated.
        message = (
            f"has {present} of the {size} forward computations of {schedule.num_stages} stages × "
            f"{schedule.num_microbatches} micro-batches; add the missing ones or correct the counts"
        )
        return [Violation(0, 0, "program", message, "complete")]
    rows = np.flatnonzero(code_mask(table, *COMPUTATIONS))
    cell = table.stage[rows].astype(np.int64) * schedule.num_microbatches + table.microbatch[rows]
    key = table.kind[rows].astype(np.int64) * size + cell
    count = np.bincount(key, minlength=4 * size).reshape(4, size)
    forward, full, inward, weight = count
    if forward_only:
        good = (forward == 1) & (full + inward + weight == 0)
    else:
        good = (forward == 1) & (full + inward == 1) & (weight == inward)
    if good.all():
        return []
    place = np.full(4 * size, NOTHING)
    place[key[::-1]] = rows[::-1]  # the first row wins
    return [
        *_repeated(schedule, rows),
        *_missing_or_mixed(schedule, np.flatnonzero(~good), place.reshape(4, size), forward_only=forward_only),
    ]


def repeated_rows(rows: NDArray[np.int64], *keys: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the rows whose keys (columns already taken at ``rows``) stand at an earlier one of ``rows`` too."""
    order = np.lexsort((rows, *keys))
    same = np.ones(max(len(rows) - 1, 0), np.bool_)
    for key in keys:
        same &= key[order][1:] == key[order][:-1]
    return np.sort(rows[order][1:][same])


def _repeated(schedule: Schedule, rows: NDArray[np.int64]) -> Iterator[Violation]:
    table = schedule.table
    for row in repeated_rows(rows, table.kind[rows], table.stage[rows], table.microbatch[rows]).tolist():
        yield violation_at(table, row, "complete", "it stands in the schedule already; remove one of them")


def _missing_or_mixed(
    schedule: Schedule, cells: NDArray[np.int64], place: NDArray[np.int64], *, forward_only: bool
) -> Iterator[Violation]:
    """Name what the incomplete cells lack or have too much of; ``place`` is a row per (kind, cell) or ``NOTHING``."""
    for cell in cells.tolist():
        stage, microbatch = divmod(cell, schedule.num_microbatches)
        rows = place[:, cell].tolist()
        forward, full, inward, weight = (row != NOTHING for row in rows)
        missing: list[tuple[Kind, str]] = []
        surplus: list[tuple[Kind, str]] = []
        if not forward:
            missing.append((Kind.F, "every stage runs every micro-batch forward once; add it"))
        if forward_only:
            why = "a forward-only program has no backward; remove it"
            surplus.extend((kind, why) for kind in sorted(BACKWARDS) if rows[kind] != NOTHING)
        elif full and (inward or weight):
            why = f"the full backward {Action(Kind.B, stage, microbatch)} is there too; keep B, or I and W"
            surplus.append((Kind.I if inward else Kind.W, why))
        elif not full and not inward and not weight:
            missing.append((Kind.B, "every forward needs its backward; add B, or I and W"))
        elif not full and inward != weight:
            missing.append((Kind.W if inward else Kind.I, "a split backward has an I and a W; add it"))
        rank = schedule.rank_of(stage, microbatch)
        for kind, why in missing:
            text = str(Action(kind, stage, microbatch))
            yield Violation(rank, len(schedule.actions[rank]), text, f"missing: {why}", "complete")
        for kind, why in surplus:
            yield violation_at(schedule.table, rows[kind], "complete", why)
