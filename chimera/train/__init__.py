"""Floor 6: joins models, data and the runtime into a training run."""
