"""Training: ``fit`` and the presets of runs."""
