"""What ``--json`` prints has the keys that docs/json.md documents, neither more nor fewer."""

import json
import re
from pathlib import Path

import pytest

from llmtool import cli
from tests.test_train_report import HISTORY, write_run
from tests.tiny_tasks import write_lambada, write_tokenizer


def documented(root: Path) -> dict[str, set[str]]:
    """Schema -> its keys, out of the tables of the page."""
    _, *sections = re.split(r"^## ", (root / "docs" / "json.md").read_text(), flags=re.MULTILINE)
    return {section.split()[0]: set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) for section in sections}


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    """Run a command line; its one JSON object."""
    def run(*args: object, status: int = 0) -> dict:
        assert cli.main([*map(str, args), "--json"]) == status
        return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return run


_QUICK = ("--steps", 1, "--seq-len", 16, "--batch-per-device", 1, "--set", "model.n_layers=1")


def _corpus(folder: Path) -> Path:
    (folder / "corpus.txt").write_text("the red boat")
    return folder / "corpus.txt"


def test_every_schema_is_documented(printed, root: Path, oracle: Path, tmp_path: Path) -> None:
    source, target = oracle / "hf_llama_gqa", tmp_path / "out"
    objects = [
        printed("inspect", source),
        printed("convert", source, target, "--to", "te", "--dry-run"),
        printed("convert", source, target, "--to", "te:gate=linear_first"),
        printed("inspect", target),
        printed("diff", source, target),
        printed("verify", source, target),
        printed("eval", "lambada", "--ckpt", source, "--data", write_lambada(tmp_path / "lambada.jsonl"),
                "--tokenizer", write_tokenizer(tmp_path / "tokenizer"), "--mesh", "data=8"),
        printed("layouts"),
        printed("data", "tokenize", _corpus(tmp_path), tmp_path / "tokens", "--tokenizer", tmp_path / "tokenizer"),
        printed("presets"),
        printed("presets", "show", "gpt-5b", "--strict-pax"),
        printed("pretrain", "--config", "llama-tiny", *_QUICK, "--data", "synthetic", "--out", tmp_path / "trained"),
        printed("pretrain", "--config", "llama-tiny", *_QUICK, "--benchmark", "--skip-steps", "1"),
        printed("plan", "--config", "llama-tiny", "--devices", "8", "--no-compile"),
        printed("report", write_run(tmp_path / "run", HISTORY)),
        printed("inspect", tmp_path / "nothing", status=2),
    ]
    pages = documented(root)
    for found in objects:
        assert set(found) == pages[found["schema"]], found["schema"]
    assert {found["schema"] for found in objects} == set(pages)


def test_figures_of_a_conversion(printed, oracle: Path, tmp_path: Path) -> None:
    report = printed("convert", oracle / "hf_llama_gqa", tmp_path / "out", "--to", "pax:repeat")
    assert report["parameters"] == printed("inspect", tmp_path / "out")["parameters"]
    assert report["bytes_written"] == 4 * report["parameters"]
    assert report["from_word"].startswith("hf")
    assert report["to_word"].startswith("pax:")
    assert report["model"]["n_kv_heads"] == 2
    assert sum(report["dtypes"].values()) == report["tensors"]


def test_a_difference_is_named(printed, oracle: Path) -> None:
    found = printed("diff", oracle / "pax_llama_gqa", oracle / "pax_llama_mha", status=1)
    assert found["equal"] is False
    assert found["mismatched"]
