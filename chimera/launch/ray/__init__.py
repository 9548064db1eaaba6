"""Jobs on a Ray cluster, for the extra ``ray``: nothing outside imports these modules unless a user asks for Ray."""
