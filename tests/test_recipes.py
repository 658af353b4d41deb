"""Every recipe file in the job folders runs, on small checkpoints that foreign code wrote."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtool.convert import open_checkpoint
from tests.test_eval_recipes import EVALUATIONS
from tests.test_train_recipes import PLANNED

FOLDERS = ("convert", "evaluate", "train", "finetune")

# recipe -> its variables: {oracle} and {tmp} are folders
SHRUNKEN = {
    "convert/recipes/meta-to-pax-llama2-70b.sh": {"SRC": "{oracle}/meta_llama2_gqa_mp2", "DST": "{tmp}/out"},
    "convert/recipes/meta-to-hf.sh": {"SRC": "{oracle}/meta_llama3_gqa_mp2", "DST": "{tmp}/out", "SHARD_SIZE": "20KB"},
    "convert/recipes/hf-to-te.sh": {"SRC": "{oracle}/hf_llama_gqa", "DST": "{tmp}/out"},
    "convert/recipes/pax-to-hf.sh": {
        "SRC": "{oracle}/pax_llama_gqa", "DST": "{tmp}/out", "MODEL_CONFIG": "{tmp}/facts.json"},
    "convert/recipes/nvidia-fw2te.sh": {
        "INPUT": "{oracle}/pax_llama_gqa", "OUTPUT": "{tmp}/te", "BACK": "{tmp}/out",
        "FLAGS": "--num-of-layer 2 --num-of-head 4 --num-gqa-groups 2 --head-dim 4 --mlp-intermediate-dim 24 "
                 "--use-gated-activations --pax-split-qkv --te-qkv-layout kv_packed"},
    "convert/recipes/gguf-to-hf.sh": {"SRC": "{oracle}/hf_llama_gqa", "DST": "{tmp}/out"},
    "convert/recipes/convert.slurm": {
        "SRC": "{oracle}/meta_llama2_gqa_mp2", "DST": "{tmp}/out", "REPORT": "{tmp}/report.json"},
}


def recipes(root: Path) -> set[str]:
    """Everything in the job folders that is not a guide."""
    return {str(path.relative_to(root)) for folder in FOLDERS for path in (root / folder).rglob("*")
            if path.is_file() and path.suffix not in (".md", ".jsonl") and "__pycache__" not in path.parts}


def test_every_recipe_is_run_by_a_test(root: Path) -> None:
    assert recipes(root) == {*SHRUNKEN, *EVALUATIONS, *PLANNED, "convert/demo.py"}


@pytest.mark.parametrize("recipe", SHRUNKEN)
def test_recipe(recipe: str, root: Path, oracle: Path, tmp_path: Path) -> None:
    launcher = tmp_path / "bin" / "llmtool"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m llmtool "$@"\n')
    launcher.chmod(0o755)
    (tmp_path / "facts.json").write_text(
        '{"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24, '
        '"hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "max_position_embeddings": 8, '
        '"tie_word_embeddings": false}')
    variables = {name: value.format(oracle=oracle, tmp=tmp_path) for name, value in SHRUNKEN[recipe].items()}
    env = {**os.environ, **variables, "PATH": f"{launcher.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", root / recipe], capture_output=True, text=True, env=env, cwd=root, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().splitlines()[-1].startswith("equal")  # each recipe ends in `llmtool diff`
    assert open_checkpoint(tmp_path / "out").config.d_model == 16


@pytest.mark.parametrize("recipe", [name for name in SHRUNKEN if name.endswith((".sh", ".slurm"))])
def test_recipe_is_executable_and_strict(recipe: str, root: Path) -> None:
    path = root / recipe
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text


def test_demo(root: Path, oracle: Path, tmp_path: Path) -> None:
    command = [sys.executable, root / "convert" / "demo.py", "--model", oracle / "hf_llama_gqa", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" equal") == 6
    assert not (tmp_path / "checkpoints").exists()
