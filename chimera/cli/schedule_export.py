"""``chimera schedule export``: builds or reads, lowers if asked, and hands over to ``ir``, which writes the forms."""
