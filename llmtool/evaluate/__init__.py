"""Zero-shot evaluation: tokenizers, data sets, protocols, and the scorer that answers their requests."""
