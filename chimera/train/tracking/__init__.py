"""What is told of a run besides its losses: its record, and the trackers that rows and record go to.

Nothing is re-exported here: ``record`` is the value, ``provenance`` finds out what it says of its origin, ``masking``
keeps secrets out of it, ``tracker`` is the interface, ``tracking`` drives whatever implements it.
"""
