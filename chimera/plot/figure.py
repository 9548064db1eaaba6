"""What all figures share: a figure outside pyplot's global state, one look, and files written whole or not at all."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chimera.errors import UsageError
from chimera.ir.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["INK", "check_paths", "new_figure", "save", "settings"]

_SUFFIXES: Final = (".pdf", ".png", ".svg")
INK: Final = "#333333"
"""The colour of axes and words."""
_RESOLUTION_DPI: Final = 160
_SETTINGS: Final[Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
    "figure.constrained_layout.hspace": 0.02,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.6,
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3.0,
    "ytick.major.size": 3.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    # TrueType in PDF: text can be searched and edited, and print shops take it.
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "chimera",
}
# Without dates the same figure is the same file.
_METADATA: Final[dict[str, dict[str, Any]]] = {
    ".pdf": {"CreationDate": None, "Creator": "chimera"},
    ".png": {"Software": "chimera"},
    ".svg": {"Date": None, "Creator": "chimera"},
}


def check_paths(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the paths of one figure; they are checked before any work is done.

    Raises:
        UsageError: there is no path, or a suffix names no format.
    """
    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(p) for p in path]
    if not paths:
        raise UsageError("no path for the figure; needed: at least one, ending in .pdf, .png or .svg")
    for target in paths:
        if target.suffix.lower() not in _SUFFIXES:
            raise UsageError(
                f"--out {target}: the suffix {target.suffix!r} names no format; needed: .pdf, .png or .svg"
            )
    return paths


def new_figure(width_in: float, height_in: float) -> "Figure":
    """Return an empty figure that no global list of figures knows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def settings() -> Any:
    """Return the context within which figures are drawn and saved."""
    from matplotlib import rc_context

    return rc_context(_SETTINGS)


def save(figure: "Figure", paths: Iterable[Path]) -> None:
    """Write ``figure`` to all paths; none appears before all are written."""
    with ExitStack() as stack:
        targets = [(path, stack.enter_context(replacing(path))) for path in paths]
        for path, temporary in targets:
            suffix = path.suffix.lower()
            figure.savefig(temporary, format=suffix[1:], dpi=_RESOLUTION_DPI, metadata=_METADATA[suffix])
