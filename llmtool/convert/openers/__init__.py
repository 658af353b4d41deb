"""One opener a layout: from a path to a :class:`~llmtool.convert.checkpoint.Checkpoint`, from headers alone."""
