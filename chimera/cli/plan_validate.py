"""``chimera plan validate``: the planner's predictions beside what was published or measured.

The comparison is ``chimera.plan``'s; here it becomes tables, a JSON document, a figure.
"""

import json as json_form
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from chimera.cli.options import FileOption, Flag
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.plan.comparison import Errors, TableResult
from chimera.plan.validate import VALIDATIONS, validate
from chimera.plan.validate_steps import validate_file
from chimera.plot.validation import plot_validation

__all__ = ["plan_validate"]

_Table = Annotated[str | None, arg(constructor=str, metavar="NAME", help_behavior_hint="")]
_Most = 24
"""Rows of a table that are printed; the worst of a longer one."""


def plan_validate(
    *,
    table: _Table = None,
    data: FileOption = None,
    json: Flag = False,
    out: FileOption = None,
) -> None:
    """Recompute published tables and say how far off the planner is: predicted, published, error.

    Without options all tables of the package are recomputed. The errors under "left out" are those of constants fitted
    without the table.

    Example:
        chimera plan validate --table megatron

    Args:
        table: one table of the package
        data: a CSV FILE of measured runs instead: gpus, global_batch, micro_batch, hidden, heads, layers, seq, tp, dp,
            pp, iteration_ms
        json: print a JSON document instead
        out: also draw predicted against published into FILE (.pdf, .png or .svg)
    """
    results = _results(table, data)
    if out is not None:
        plot_validation(results, out)
        print(f"wrote {out}", file=sys.stderr)
    if json:
        print(json_form.dumps([_as_dict(result) for result in results], indent=1, ensure_ascii=False))
        return
    for result in results:
        _print_result(result)


def _results(table: str | None, data: Path | None) -> list[TableResult]:
    if data is not None:
        measured = [validate_file(data)]
        return measured if table is None else [validate(table), *measured]
    return [validate(name) for name in (VALIDATIONS if table is None else [table])]


def _print_result(result: TableResult) -> None:
    out = console()
    out.print(f"{result.table}: {result.title}", style="bold")
    rows = sorted(result.rows, key=lambda row: -abs(row.error_pct))[:_Most] if len(result.rows) > _Most else result.rows
    print_table(
        out,
        ["", f"predicted\n{result.unit}", f"published\n{result.unit}", "error"],
        [[row.label, _figure(row.predicted), _figure(row.published), f"{row.error_pct:+.1f} %"] for row in rows],
    )
    if len(rows) < len(result.rows):
        print_wrapped(out, f"the {len(rows)} rows that are furthest off, of {len(result.rows)}")
    out.print()
    summary = [("all rows", result.errors), *result.parts.items()]
    if result.left_out is not None:
        summary.append(("left out of the fit", result.left_out))
    print_table(
        out, ["error, %", "rows", "mean", "median", "max"], [_summary(name, errors) for name, errors in summary]
    )
    out.print()
    if result.choices:
        headings = ["choice among the runs of", "", "predicted fastest", "measured fastest", "slower by"]
        print_table(
            out,
            headings,
            [(each.model, each.among, each.chosen, each.best, f"{each.slower_pct:.1f} %") for each in result.choices],
        )
        out.print()


def _summary(name: str, errors: Errors) -> list[str]:
    return [name, str(errors.rows), f"{errors.mean_pct:.2f}", f"{errors.median_pct:.2f}", f"{errors.max_pct:.1f}"]


def _figure(value: float) -> str:
    return f"{value:.4g}"


def _as_dict(result: TableResult) -> dict[str, object]:
    errors = result.errors
    return {
        "table": result.table,
        "unit": result.unit,
        "rows": errors.rows,
        "mean_pct": errors.mean_pct,
        "median_pct": errors.median_pct,
        "max_pct": errors.max_pct,
        "within_5_pct": _share_within(result, 5),
        "within_10_pct": _share_within(result, 10),
        "parts": {name: asdict(part) for name, part in result.parts.items()},
        "left_out": asdict(result.errors_left_out),
        "choices": [asdict(each) for each in result.choices],
        "comparisons": _comparisons(result),
    }


def _share_within(result: TableResult, percent: float) -> float:
    return sum(abs(row.error_pct) <= percent for row in result.rows) / len(result.rows)


def _comparisons(result: TableResult) -> Sequence[dict[str, object]]:
    return [
        {"label": row.label, "predicted": row.predicted, "published": row.published, "error_pct": row.error_pct}
        for row in result.rows
    ]
