"""The recipes in ``evaluate/recipes`` run, on a tiny model: on one device, on eight, and as two processes of a job."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_tasks import write_boolq, write_lambada, write_tokenizer

EVALUATIONS = {
    "evaluate/recipes/one-machine.sh": {"DTYPE": "float32"},
    "evaluate/recipes/eight-devices.sh": {},
    "evaluate/recipes/llama2-70b-16-gpus.slurm": {"MESH": "fsdp=2,tensor=2"},
}
# what srun does, as far as a job of two tasks notices: it starts the command twice; here JAX is told the rest
SRUN = """#!/bin/sh
SLURM_STEP_NUM_TASKS=2 INDEX=0 "$@" & first=$!
SLURM_STEP_NUM_TASKS=2 INDEX=1 "$@" || exit 1
wait $first
"""
LAUNCHER = """#!{python}
import os, sys
import jax
if "INDEX" in os.environ:
    jax.config.update("jax_num_cpu_devices", 2)
    join = jax.distributed.initialize
    jax.distributed.initialize = lambda: join("127.0.0.1:{port}", 2, int(os.environ["INDEX"]))
from llmtool.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("recipe", [
    *(name for name in EVALUATIONS if name.endswith(".sh")),
    *(pytest.param(name, marks=pytest.mark.slow) for name in EVALUATIONS if name.endswith(".slurm")),
])
def test_recipe(recipe: str, root: Path, oracle: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = {"llmtool": LAUNCHER.format(python=sys.executable, port=port), "srun": SRUN}
    (tmp_path / "bin").mkdir()
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, **EVALUATIONS[recipe], "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
           "PYTHONPATH": str(root), "CKPT": str(oracle / "hf_llama_gqa"), "OUT": str(tmp_path / "out"),
           "LAMBADA": str(write_lambada(tmp_path / "lambada.jsonl")),
           "BOOLQ": str(write_boolq(tmp_path / "boolq.jsonl")),
           "OPTIONS": f"-q --tokenizer {write_tokenizer(tmp_path / 'tokenizer')}"}
    if recipe.endswith(".slurm"):
        del env["XLA_FLAGS"]
    done = subprocess.run(["bash", root / recipe], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = 1 if recipe.endswith(".slurm") else 2
    assert done.stdout.count("accuracy") == wanted
    outputs = [tmp_path / "out"] if wanted == 1 else sorted((tmp_path / "out").iterdir())
    assert [len(path.read_text().splitlines()) for path in outputs] == [13] * wanted


@pytest.mark.parametrize("recipe", EVALUATIONS)
def test_recipe_is_executable_and_strict(recipe: str, root: Path) -> None:
    path = root / recipe
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
