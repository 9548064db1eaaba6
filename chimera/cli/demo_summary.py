"""What ``chimera demo`` found, as values, as text in the terminal and as a Markdown file.

Losses and entropies are in nats per token. Nothing here measures anything.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from chimera.cli.terminal import print_table, print_wrapped

__all__ = ["DemoSummary", "ScheduleFigures", "show_summary", "summary_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFigures:
    """One schedule's step, three times over: seconds from the first start to the last end, and the idle share.

    Attributes:
        predicted_s, predicted_bubble: simulated from costs measured one rank at a time, with free messages.
        virtual_s, virtual_bubble: on the virtual device, at the pace of those costs.
        measured_s, measured_bubble: of the training run's last step.
    """

    predicted_s: float
    predicted_bubble: float
    virtual_s: float
    virtual_bubble: float
    measured_s: float
    measured_bubble: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSummary:
    """What ``summary.json`` holds; losses and entropies in nats per token.

    Attributes:
        vocabulary_size: V; ln V is the loss of knowing nothing.
        unigram_entropy: the loss of knowing the training text's word frequencies and nothing else.
        heldout_mlm_before, heldout_mlm_after: held-out masked-word loss, apart from next-sentence.
        steps, tokens: of the training run.
        seconds: of the whole demo.
        cores, ranks: of this machine and of the run.
        schedules: the figures of each schedule.
        compared_steps: first steps that were made by 1F1B too.
        largest_loss_difference: between Chimera's and 1F1B's training loss over these, relative.
    """

    vocabulary_size: int
    unigram_entropy: float
    heldout_mlm_before: float
    heldout_mlm_after: float
    steps: int
    tokens: int
    seconds: float
    cores: int
    ranks: int
    schedules: Mapping[str, ScheduleFigures]
    compared_steps: int
    largest_loss_difference: float


_FIGURES: Final = (
    ("predicted from costs measured one rank at a time", "predicted"),
    ("measured on the virtual device at those costs", "virtual"),
    ("measured on this machine", "measured"),
)


def _rows(found: DemoSummary) -> list[list[str]]:
    """Return, for each way of knowing, the step and the bubble of both schedules."""
    return [
        [
            label,
            *(
                text
                for figures in found.schedules.values()
                for text in (
                    f"{getattr(figures, f'{key}_s') * 1e3:.1f}",
                    f"{getattr(figures, f'{key}_bubble'):.1%}",
                )
            ),
        ]
        for label, key in _FIGURES
    ]


def _headings(found: DemoSummary) -> list[str]:
    return ["", *(text for name in found.schedules for text in (f"{name}\nms", f"{name}\nidle"))]


def _learned(found: DemoSummary) -> list[str]:
    log_v = math.log(found.vocabulary_size)
    below = found.unigram_entropy - found.heldout_mlm_after
    return [
        (
            f"Held-out masked-word loss before training {found.heldout_mlm_before:.3f} nats, "
            f"{abs(found.heldout_mlm_before / log_v - 1):.1%} from ln V = {log_v:.3f} (V = {found.vocabulary_size:,}): "
            "the model knew nothing."
        ),
        f"After {found.steps} steps ({found.tokens / 1e6:.1f} M tokens) {found.heldout_mlm_after:.3f} nats, "
        f"{abs(below):.2f} {'below' if below > 0 else 'above'} the unigram entropy of {found.unigram_entropy:.3f}"
        + (": it has learned from context, not only which words are frequent." if below > 0 else "."),
        (
            f"1F1B gives the same training losses over the first {found.compared_steps} steps, to "
            f"{found.largest_loss_difference:.1e}: a schedule changes when work is done, not what is computed."
        ),
    ]


def _explained(found: DemoSummary) -> list[str]:
    chimera, baseline = found.schedules["chimera"], found.schedules["1f1b"]
    text = [
        (
            f"On the virtual device a step by Chimera takes {chimera.virtual_s / baseline.virtual_s:.2f} of the time "
            f"by 1F1B (predicted {chimera.predicted_s / baseline.predicted_s:.2f}); the prediction misses the "
            f"measured step by {abs(chimera.virtual_s / chimera.predicted_s - 1):.1%}."
        )
    ]
    if found.ranks > found.cores:
        text.append(
            f"This machine has {found.cores} cores for {found.ranks} ranks, so here ranks wait for a core rather than "
            "for each other, and the step measured on it says little of the schedule. On the virtual device the same "
            "program runs with real processes and messages while computation is waited for, as with a core per rank."
        )
    return text


def _files(out: Path) -> list[tuple[str, str]]:
    return [
        (f"{out}/timeline.png, .pdf", "what each rank did: measured above predicted"),
        (f"{out}/trace.json", "the measured step, for ui.perfetto.dev"),
        (f"{out}/loss.png, .pdf", "the training curve"),
        (f"{out}/metrics.jsonl", "every step's figures; 1f1b/metrics.jsonl for 1F1B"),
        (f"{out}/costs.json", "stage costs, for 'chimera simulate --costs'"),
        (f"{out}/summary.md, .json", "this summary"),
    ]


def show_summary(screen: Console, found: DemoSummary, out: Path) -> None:
    """Print the summary."""
    screen.print("What was learned", style="bold")
    for line in _learned(found):
        print_wrapped(screen, line, indent="  ", first="  ")
    screen.print("\nOne step, and the share of it that ranks are idle", style="bold")
    print_table(screen, _headings(found), _rows(found))
    screen.print()
    for line in _explained(found):
        print_wrapped(screen, line)
    screen.print("\nFiles", style="bold")
    files = _files(out)
    width = max(len(path) for path, _ in files)
    for path, what in files:
        screen.print(f"  {path:{width}}  {what}")
    screen.print(f"\n{found.seconds:.0f} s in all.")


def summary_text(found: DemoSummary, out: Path) -> list[str]:
    """Return the summary as Markdown."""
    names = list(found.schedules)
    return [
        "# chimera demo",
        "",
        *(f"- {line}" for line in _learned(found)),
        "",
        f"| one step | {' | '.join(f'{name}, ms | {name}, idle' for name in names)} |",
        f"|---|{'---|' * 2 * len(names)}",
        *(f"| {' | '.join(row)} |" for row in _rows(found)),
        "",
        *_explained(found),
        "",
        *(f"- `{path}`: {what}" for path, what in _files(out)),
        "",
        f"{found.seconds:.0f} s in all, {found.ranks} ranks on {found.cores} cores.",
    ]
