"""Figures: timelines and training curves, as PDF, PNG or SVG. matplotlib is imported when one is drawn."""

from chimera.plot.curve import plot_curve
from chimera.plot.timeline import plot_timeline

__all__ = ["plot_curve", "plot_timeline"]
