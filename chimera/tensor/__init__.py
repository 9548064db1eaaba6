"""Floor 4: the torch pieces that runtime and models both stand on; knows neither stages nor architectures."""
