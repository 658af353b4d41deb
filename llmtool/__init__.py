"""Move LLM checkpoints between layouts, measure them, train and adapt them."""

__version__ = "0.1.0"
