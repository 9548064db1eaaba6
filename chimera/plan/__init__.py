"""Floor 3: what a layout costs before it runs. Imports no torch."""
