"""``python -m llmtool``."""

import sys

from llmtool.cli import main

if __name__ == "__main__":
    sys.exit(main())
