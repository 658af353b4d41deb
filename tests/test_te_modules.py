"""Transformer Engine's own modules judge our TE folders: equal logits with praxis, on praxis' weights.

One process runs every folder (``te_reference.py``, which says how the wheel is found and why it is not imported
here). The judge is independent of us twice over: the layers are NVIDIA's code, the expected logits praxis'.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmtool.convert import convert_checkpoint

REFERENCE = Path(__file__).with_name("te_reference.py")
FIXTURES = Path(__file__).parent / "fixtures"
ORACLE, GOLDEN = FIXTURES / "oracle", FIXTURES / "golden" / "praxis_forward"
HEADS = {"n_heads": 4, "head_dim": 4}  # of every oracle; TE's arrays do not say them
FACTS = {"n_heads": 4, "norm_eps": 1e-5, "rope_theta": 10000}
TOLERANCE = 1e-4

NVIDIA = {"nv_gpt_te": "pax_gpt", "nv_gpt_repeat_te": "pax_gpt_repeat",
          "nv_llama_mha_te": "pax_llama_mha", "nv_llama_gqa_te": "pax_llama_gqa"}
GATED = ("nv_llama_mha_te", "nv_llama_gqa_te")  # linear_first, as NVIDIA's converter writes it
OURS = {  # our folder: (source, layout words of source and target, whose logits it must give)
    "gpt": ("pax_gpt", None, "te", "pax_gpt"),
    "gpt_repeat": ("pax_gpt_repeat", None, "te:repeat", "pax_gpt_repeat"),
    "gpt_unrolled": ("pax_gpt_repeat", None, "te", "pax_gpt_repeat"),
    "gpt_separate_embedding": ("pax_gpt_sepemb", None, "te:qkv=separate", "pax_gpt_sepemb"),
    "mha": ("pax_llama_mha", None, "te:gate=act_first", "pax_llama_mha"),
    "mha_separate": ("pax_llama_mha", None, "te:gate=act_first,qkv=separate", "pax_llama_mha"),
    "mha_repeat": ("pax_llama_mha_repeat", None, "te:gate=act_first,repeat", "pax_llama_mha_repeat"),
    "gqa": ("pax_llama_gqa", None, "te:gate=act_first", "pax_llama_gqa"),
    "gqa_separate": ("pax_llama_gqa", None, "te:gate=act_first,qkv=separate", "pax_llama_gqa"),
    "gqa_repeat": ("pax_llama_gqa_repeat", None, "te:gate=act_first,repeat", "pax_llama_gqa_repeat"),
    "mha_from_nvidia": ("nv_llama_mha_te", "te:gate=linear_first", "te:gate=act_first", "pax_llama_mha"),
    "gqa_from_nvidia": ("nv_llama_gqa_te", "te:gate=linear_first", "te:gate=act_first", "pax_llama_gqa"),
    "hf_gqa": ("hf_llama_gqa", None, "te", "hf_llama_gqa"),
    "hf_gpt2": ("hf_gpt2", None, "te", "hf_gpt2"),
}

pytestmark = pytest.mark.skipif(
    runpy.run_path(str(REFERENCE))["wheel"]() is None,
    reason="no transformer-engine wheel: pip install --no-deps --target DIR transformer-engine, LLMTOOL_TE_WHEEL=DIR",
)


def golden(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and the logits that the foreign model gives for them."""
    if name.startswith("hf_"):
        arrays = np.load(ORACLE / name / "logits.npz")
        return arrays["ids"], arrays["logits"]
    arrays = np.load(GOLDEN / f"{name}__plain.npz")
    return arrays["in.ids"], arrays["out.logits"]


def state_of(folder: Path) -> Path:
    """The folder of arrays within a checkpoint."""
    return next(folder.rglob("mdl_vars.params.lm.final_ln.scale")).parent


def run(folders: dict[str, tuple[Path, str]], work: Path, facts: dict) -> dict[str, np.ndarray]:
    """Logits of each (folder, name of the golden numbers whose tokens to use), in one process."""
    (work / "config.json").write_text(json.dumps(facts))
    command = [sys.executable, str(REFERENCE), "--config", str(work / "config.json")]
    for name, (folder, reference) in folders.items():
        np.save(work / f"{name}.ids.npy", golden(reference)[0])
        command += [str(state_of(folder)), str(work / f"{name}.ids.npy"), str(work / f"{name}.out.npy")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: np.load(work / f"{name}.out.npy") for name in folders}


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Logits of NVIDIA's folders as they are and of every folder that we write."""
    work = tmp_path_factory.mktemp("te")
    folders = {name: (ORACLE / name, reference) for name, reference in NVIDIA.items()}
    for name, (source, source_word, target_word, reference) in OURS.items():
        convert_checkpoint(ORACLE / source, work / name, to=target_word, from_=source_word, expected=HEADS)
        folders[name] = (work / name, reference)
    return run(folders, work, FACTS)


def distances(logits: dict[str, np.ndarray], references: dict[str, str]) -> dict[str, float]:
    """Largest difference of each folder's logits from the foreign ones."""
    return {name: float(np.abs(logits[name] - golden(reference)[1]).max()) for name, reference in references.items()}


# Few tests rather than one a folder: every worker of a parallel run that gets one of them fills the fixture anew.
def test_the_judge_agrees_with_praxis_where_there_is_no_gate(logits: dict[str, np.ndarray]) -> None:
    for name, far in distances(logits, {name: NVIDIA[name] for name in ("nv_gpt_te", "nv_gpt_repeat_te")}).items():
        assert far < TOLERANCE, (name, far)


def test_linear_first_folders_are_wrong_until_converted(logits: dict[str, np.ndarray]) -> None:
    for name, far in distances(logits, {name: NVIDIA[name] for name in GATED}).items():
        assert far > 1, (name, far)
    converted = {name: OURS[name][3] for name in ("mha_from_nvidia", "gqa_from_nvidia")}
    for name, far in distances(logits, converted).items():
        assert far < TOLERANCE, (name, far)


def test_folders_we_write_give_the_foreign_logits(logits: dict[str, np.ndarray]) -> None:
    for name, far in distances(logits, {name: facts[3] for name, facts in OURS.items()}).items():
        assert far < TOLERANCE, (name, far)


def test_no_order_of_the_activations_mends_a_linear_first_folder(
    logits: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """TE turns ('linear', 'silu') into ('silu', 'linear') and leaves the halves of the kernel where they are."""
    folders = {name: (ORACLE / name, NVIDIA[name]) for name in GATED}
    for name, found in run(folders, tmp_path, {**FACTS, "activations": ["linear", "silu"]}).items():
        np.testing.assert_array_equal(found, logits[name])
