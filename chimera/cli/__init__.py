"""Floor 7: the commands. Each is one typed function in its own module; ``main`` finds it in the table and calls it.

Results go to stdout, everything else to stderr. A command imports what it needs when it runs, so that ``--help`` and
the schedule commands answer without loading torch.
"""
