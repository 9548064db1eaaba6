"""Floor 0: the values everything else stands on, and the one dependency relation."""
