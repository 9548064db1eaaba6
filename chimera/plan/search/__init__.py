"""The search over layouts: what there is to choose, bounds that prune, and the order in which the rest is simulated.

Nothing is re-exported here: ``search.space`` lists the choices, ``search.bounds`` bounds them as arrays,
``search.searching`` answers, ``search.refine`` orders the best anew and ``search.explain`` says why.
"""
