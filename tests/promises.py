"""How long tests wait for what the design promises.

Ten seconds from a rank's death to the end of every process hold on a machine whose ranks have a core each. Tests run on
two shared cores, often beside other work, so they allow three times as long: what hangs still fails.
"""

END_AFTER_DEATH_S = 30.0
END_AFTER_TIME_OUT_S = 30.0
"""Beyond the time-out itself."""
