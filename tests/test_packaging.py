"""What the package imports is what pyproject.toml declares; the job folders hold no package of Python's."""

import ast
import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

DISTRIBUTIONS = {"absl": "absl-py", "orbax": "orbax-checkpoint", "transformer_engine_jax": "transformer-engine"}


def imported(folder: Path) -> dict[str, Path]:
    """Third-party top-level module -> a file that imports it."""
    found: dict[str, Path] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = ([alias.name for alias in node.names] if isinstance(node, ast.Import)
                     else [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else [])
            found |= {name.partition(".")[0]: path for name in names}
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names | {"llmtool"}}


def test_imports_are_declared(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    declared = {re.split(r"[\[<>=~! ]", text)[0].replace("_", "-").lower() for text in requirements}
    lacking = {name: str(path) for name, path in imported(root / "llmtool").items()
               if DISTRIBUTIONS.get(name, name).replace("_", "-").lower() not in declared}
    assert not lacking


def test_job_folders_are_no_packages(root: Path) -> None:
    """A top-level package named ``evaluate`` would shadow Hugging Face's."""
    for folder in ("convert", "evaluate", "train", "finetune"):
        assert (root / folder / "README.md").is_file()
        assert not (root / folder / "__init__.py").exists()
