"""The list scheduler: an order of computations for any placement, costs and memory cap, beside a proved lower bound.

Nothing is re-exported here, so that a published schedule may stand on the search while the search falls back on the
published ones: ``search.problem`` is the question, ``search.searching`` answers it, ``search.bounds`` bounds it,
``search.exact`` closes small cases.
"""
