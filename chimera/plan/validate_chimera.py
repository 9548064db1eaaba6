"""The Chimera paper's own comparisons: the layout that its model picks, and its speed-ups over five baselines.

Li and Hoefler, SC 2021 (arXiv 2107.06925), figure 13 and §4.4. Both were measured on one P100 a node; here every layout
is estimated with the constants of that device, none of which was fitted on these figures.
"""

from typing import Final

from chimera.plan.comparison import Comparison, TableResult
from chimera.plan.estimate import Estimate
from chimera.plan.estimating import estimate
from chimera.plan.hardware import Cluster
from chimera.plan.hardware_file import read_device, read_software
from chimera.plan.layout import Layout, Recompute
from chimera.plan.shape import ModelShape

__all__ = ["BERT_48", "GPT_2", "PUBLISHED_CHOICES", "chimera_choice", "chimera_speedups", "figure_13", "speedups"]

BERT_48: Final = ModelShape(
    family="bert", hidden=1024, layers=48, heads=16, vocab=30522, seq=128, positions=512, tied=False
)
GPT_2: Final = ModelShape(
    family="gpt", hidden=1280, layers=64, heads=20, vocab=50257, seq=632, positions=1024, tied=False
)

_BERT_CHOICES: Final = ((2, 16, 16, False), (4, 8, 16, False), (8, 4, 8, False), (16, 2, 4, False))
_GPT_CHOICES: Final = ((8, 64, 1, False), (16, 32, 1, False), (32, 16, 1, True), (64, 8, 1, True))
_BATCH: Final = 512

PUBLISHED_CHOICES: Final = {"bert-48": (8, 4, 8), "gpt-2": (16, 32, 1)}
"""The layout (d, p, b) that the paper's model picks for each model."""

_BASELINES: Final = (
    ("pipedream", 8, True, 2.01),
    ("pipedream-2bw", 16, True, 1.16),
    ("gpipe", 8, True, 1.42),
    ("gems", 8, False, 2.34),
    ("1f1b", 16, True, 1.38),
)
"""Schedule, p, recomputation and Chimera's published speed-up over it; 1f1b with a flush is DAPPLE."""

_NODES: Final = 2048


def figure_13(model: str) -> dict[tuple[int, int, int], Estimate]:
    """Return the estimates of the figure's layouts of "bert-48" (32 nodes) or "gpt-2" (512 nodes) by (d, p, b)."""
    shape, choices = (BERT_48, _BERT_CHOICES) if model == "bert-48" else (GPT_2, _GPT_CHOICES)
    return {
        (d, p, b): _estimated(shape, "chimera", d=d, p=p, b=b, m=_BATCH // (b * d), recompute=recompute)
        for d, p, b, recompute in choices
    }


def speedups() -> dict[str, tuple[float, float]]:
    """Return Chimera's predicted and published speed-up over each baseline, GPT-2 on 2,048 nodes."""
    ours = _estimated(GPT_2, "chimera", d=_NODES // 32, p=32, b=1, m=32, recompute=False).step_s
    return {
        name: (
            _estimated(GPT_2, name, d=_NODES // p, p=p, b=1, m=_NODES // (_NODES // p), recompute=recompute).step_s
            / ours,
            published,
        )
        for name, p, recompute, published in _BASELINES
    }


def _estimated(shape: ModelShape, schedule: str, *, d: int, p: int, b: int, m: int, recompute: bool) -> Estimate:
    mode: Recompute = "full" if recompute else "none"
    layout = Layout(pipeline=p, data=d, microbatch=b, microbatches=m, schedule=schedule, recompute=mode)
    return estimate(shape, layout, Cluster.of(read_device("p100-16"), d * p), read_software("chimera-2021"))


def chimera_choice() -> TableResult:
    """Compare what the paper's choice costs against the one that is cheapest here: no error where they are the same."""
    rows = []
    for model, choice in PUBLISHED_CHOICES.items():
        steps = {layout: made.step_s for layout, made in figure_13(model).items()}
        best = min(steps, key=lambda layout: steps[layout])
        rows.append(Comparison(f"{model}: published {choice}, here {best}", steps[best], steps[choice]))
    title = "step of the best layout (d, p, b) against that of the paper's choice, Li and Hoefler 2021, figure 13"
    return TableResult("chimera-fig13", title, "s", tuple(rows), {}, None)


def chimera_speedups() -> TableResult:
    """Compare the speed-ups over the five baselines."""
    rows = tuple(Comparison(f"over {name}", *pair) for name, pair in speedups().items())
    title = "Chimera's speed-ups, GPT-2 on 2,048 nodes, Li and Hoefler 2021, §4.4: a trend"
    return TableResult("chimera-speedups", title, "times", rows, {}, None)
