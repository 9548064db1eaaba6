"""Chimera: one schedule object to plan, prove, run and see."""

__version__ = "0.1.0"
