"""The recipes in ``train/recipes``: each is planned instead of started, on as many devices as its job asks for."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# recipe -> parameters of its model, rows of a step, devices
PLANNED = {
    "train/recipes/gpt-126m-one-node.sh": (125_262_336, 256, 8),
    "train/recipes/gpt-126m-8-nodes.sub": (125_262_336, 256, 64),
    "train/recipes/gpt-5b-32-nodes.sub": (5_047_558_144, 2048, 256),
    "train/recipes/gpt-175b-32-nodes.sub": (174_604_259_328, 1536, 256),
    "train/recipes/synthetic-one-node.sh": (125_262_336, 32, 8),
    "train/recipes/synthetic-32-nodes.sub": (174_604_259_328, 1536, 256),
}
LAUNCHER = """#!/bin/sh
test "$1" = pretrain || exit 9
shift
exec {python} -m llmtool plan --devices {devices} --json {how} "$@"
"""


def devices_asked_for(text: str) -> int:
    """Of the job: one process a GPU; without Slurm's lines, one node of eight."""
    asked = {name: int(value) for name, value in re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", text, re.MULTILINE)}
    if not asked:
        return 8
    assert asked["gpus-per-node"] == asked["ntasks-per-node"]
    return asked["nodes"] * asked["gpus-per-node"]


def planned(recipe: Path, root: Path, folder: Path, how: str, **variables: str) -> dict[str, Any]:
    """The plan of what a recipe would start; an option that is none, or a mesh that does not fit, fails here."""
    devices = devices_asked_for(recipe.read_text())
    commands = {"llmtool": LAUNCHER.format(python=sys.executable, devices=devices, how=how),
                "srun": '#!/bin/sh\nexec "$@"\n'}
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    env |= {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(root), "OUT": str(folder / "run"), **variables}
    done = subprocess.run(["bash", recipe], capture_output=True, text=True, env=env, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("recipe", PLANNED)
def test_recipe_can_be_planned(recipe: str, root: Path, tmp_path: Path) -> None:
    found = planned(root / recipe, root, tmp_path, "--no-compile")
    assert (found["parameters"], found["rows_per_step"], found["devices"]) == PLANNED[recipe]
    assert found["estimates"]["fits"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", PLANNED)
def test_recipe_compiles(recipe: str, root: Path, tmp_path: Path) -> None:
    compiled = planned(root / recipe, root, tmp_path, "--compile")["compiled"]
    assert compiled["reused_bytes"] == compiled["state_bytes"]


def test_options_and_variables_reach_the_run(root: Path, tmp_path: Path) -> None:
    recipe = root / "train/recipes/gpt-126m-one-node.sh"
    found = planned(recipe, root, tmp_path, "--no-compile", MESH="data=2,fsdp=4", TOKENIZER="my own.model",
                    OPTIONS="--strategy fsdp --batch-per-device 1")
    assert found["mesh"] == {"data": 2, "fsdp": 4, "tensor": 1}
    assert (found["strategy"], found["rows_per_step"]) == ("fsdp", 64)


@pytest.mark.parametrize("recipe", PLANNED)
def test_recipe_is_executable_and_strict(recipe: str, root: Path) -> None:
    path = root / recipe
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert max(map(len, text.splitlines())) <= 120
