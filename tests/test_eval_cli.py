"""``llmtool eval`` and its library: reports, results files, going on after a break, and what users get wrong."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtool import cli
from llmtool.convert import convert_checkpoint
from llmtool.errors import BadTarget, Contradiction
from llmtool.evaluate import evaluate_boolq, evaluate_lambada
from llmtool.evaluate.results import ResultsFile
from tests.tiny_tasks import write_boolq, write_lambada, write_tokenizer

KEYS = ["schema", "task", "protocol", "dataset", "dataset_sha", "n", "accuracy", "accuracy_stderr", "perplexity",
        "perplexity_stderr", "ties", "truncated", "bos", "seconds", "items_per_second"]


class Bench:
    """A tiny model, its tokenizer and its two data sets."""

    def __init__(self, oracle: Path, folder: Path):
        self.ckpt = oracle / "hf_llama_gqa"
        self.tokenizer = write_tokenizer(folder / "tokenizer")
        self.lambada, self.boolq = write_lambada(folder / "lambada.jsonl"), write_boolq(folder / "boolq.jsonl")

    def args(self, task: str, *more: object, ckpt: Path | None = None) -> list[str]:
        words = ["eval", task, "--ckpt", ckpt or self.ckpt, "--data", getattr(self, task), "--tokenizer",
                 self.tokenizer, "--mesh", "data=8", "-q", *more]
        return [str(word) for word in words]

    def run(self, task: str, **options: Any) -> Any:
        run = evaluate_lambada if task == "lambada" else evaluate_boolq
        return run(self.ckpt, data=getattr(self, task), tokenizer=self.tokenizer, mesh="data=8", **options)


@pytest.fixture
def bench(oracle: Path, tmp_path: Path) -> Bench:
    return Bench(oracle, tmp_path)


def untimed(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key not in ("seconds", "items_per_second")}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("task", ["lambada", "boolq"])
def test_a_report(task: str, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results.jsonl"
    assert cli.main(bench.args(task, "--json", "--output", output)) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == KEYS
    assert (report["task"], report["protocol"], report["n"], report["bos"]) == (task, "lm-eval", 12, False)
    header, *items = lines(output)
    assert header["schema"] == "llmtool.results/1"
    assert [item["item"] for item in items] == list(range(12))
    assert sum(item["correct"] for item in items) / 12 == pytest.approx(report["accuracy"])
    for item in items:
        asked = item["requests"]
        assert len(asked) == (1 if task == "lambada" else 2)
        assert {"choice", "context", "ids", "tokens", "loglikelihood", "greedy", "logprobs", "logits"} == set(asked[0])
        assert asked[0]["loglikelihood"] == pytest.approx(sum(asked[0]["logprobs"]))
        if task == "boolq":
            assert [each["tokens"] for each in asked] == [["no"], ["yes"]]
            assert item["prediction"] == int(asked[1]["loglikelihood"] > asked[0]["loglikelihood"])
    if task == "lambada":
        mean = np.mean([item["requests"][0]["loglikelihood"] for item in items])
        assert report["perplexity"] == pytest.approx(np.exp(-mean))


def test_a_table_for_people(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(bench.args("lambada", "--protocol", "pax")) == 0
    out = capsys.readouterr().out
    for word in ("accuracy", "perplexity", "pax, contexts begin with BOS", "12, 0 truncated, 0 ties", "original"):
        assert word in out


@pytest.mark.parametrize("to", ["meta", "pax", "te", "native"])
def test_every_layout_gives_the_same_report(to: str, bench: Bench, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    convert_checkpoint(bench.ckpt, tmp_path / "out", to=to)
    reports = []
    for ckpt in (bench.ckpt, tmp_path / "out"):
        assert cli.main(bench.args("boolq", "--json", ckpt=ckpt)) == 0
        reports.append(untimed(json.loads(capsys.readouterr().out)))
    assert reports[0] == reports[1]


def test_going_on_after_a_break(bench: Bench, tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    whole = bench.run("boolq", output=output)
    text = output.read_text()
    kept = text.splitlines(keepends=True)
    output.write_text("".join([*kept[:1], *reversed(kept[4:9])]) + kept[9][:40])  # torn in the middle of a line
    again = bench.run("boolq", output=output)
    assert again.n_scored == 12 - 5
    assert untimed(again.to_json()) == untimed(whole.to_json())
    assert [item["item"] for item in lines(output)[1:]] == list(range(12))
    done = bench.run("boolq", output=output)
    assert done.n_scored == 0
    assert untimed(done.to_json()) == untimed(whole.to_json())


def test_a_run_that_fails_leaves_what_it_has(bench: Bench, tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "scoring" and done >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run("lambada", output=output, batch_tokens=1, progress=stop)
    assert len(lines(output)) >= 1 + 8
    again = bench.run("lambada", output=output)
    assert 0 < again.n_scored <= 4


@pytest.mark.parametrize(("change", "named"), [
    ({"protocol": "pax"}, "protocol"), ({"dtype": "bfloat16"}, "dtype"), ({"limit": 5}, "limit"),
    ({"add_bos": False}, "add_bos"), ({"max_length": 20}, "max_length"),
])
def test_results_of_another_run_are_not_mixed_in(change: dict[str, Any], named: str, bench: Bench,
                                                 tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    bench.run("boolq", output=output)
    before = output.read_bytes()
    with pytest.raises(Contradiction, match=named):
        bench.run("boolq", output=output, **change)
    assert output.read_bytes() == before


def test_results_of_other_weights_are_not_mixed_in(bench: Bench, oracle: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    bench.run("boolq", output=output)
    bench.ckpt = oracle / "hf_llama_mha_tied"
    with pytest.raises(Contradiction, match="weights"):
        bench.run("boolq", output=output)


@pytest.mark.parametrize("content", [b"my notes\n", b"my notes", b'{"schema": "other"}\n', b"\xff\x00\n"])
def test_a_file_of_others_is_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(BadTarget, match="none of ours"):
        ResultsFile(path, {"task": "boolq"})
    assert path.read_bytes() == content
    with pytest.raises(BadTarget, match="folder does not exist"):
        ResultsFile(tmp_path / "no" / "folder", {})


def test_limit_and_seed(bench: Bench, tmp_path: Path) -> None:
    first = bench.run("lambada", limit=4, output=tmp_path / "first.jsonl")
    drawn = bench.run("lambada", limit=4, seed=3, output=tmp_path / "drawn.jsonl")
    assert (first.metrics.n, drawn.metrics.n) == (4, 4)
    asked = [[item["requests"][0]["context"] for item in lines(tmp_path / f"{name}.jsonl")[1:]]
             for name in ("first", "drawn")]
    assert asked[0] != asked[1]


@pytest.mark.parametrize("protocol", ["lm-eval", "pax"])
def test_contexts_longer_than_the_model_are_cut_and_counted(protocol: str, bench: Bench, tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    report = bench.run("boolq", protocol=protocol, max_length=12, output=output)
    assert report.metrics.truncated > 6
    for item in lines(output)[1:]:
        assert all(len(each["context"]) + len(each["ids"]) - 1 <= 12 for each in item["requests"])


def test_bfloat16(bench: Bench) -> None:
    report = bench.run("boolq", dtype="bfloat16", protocol="pax")
    assert report.metrics.n == 12


@pytest.mark.parametrize(("more", "message"), [
    (["--mesh", "data=3"], "there are 8"),
    (["--mesh", "rows=8"], "axes: data, fsdp, tensor"),
    (["--dtype", "int8"], "int8"),
    (["--limit", "0"], "0"),
    (["--protocol", "helm"], "helm"),
    (["--tokenizer", "nothing.json"], "nothing.json"),
    (["--ckpt", "nothing"], "no such file"),
    (["--data", "nothing.jsonl"], "nothing.jsonl"),
    (["--protocol", "pax", "--no-bos"], "BOS"),
])
def test_mistakes_are_one_message(more: list[str], message: str, bench: Bench,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(bench.args("boolq", *more)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_tokenizer_of_another_model_is_refused(bench: Bench, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    from tests.small_tokenizers import write_json_tokenizer

    other = write_json_tokenizer(tmp_path / "other")
    assert cli.main(bench.args("boolq", "--tokenizer", other or tmp_path / "other")) == 2
    assert "32 rows" in capsys.readouterr().err


_PROCESS = """
import sys, jax
port, index, *arguments = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index), initialization_timeout=60)
from llmtool import cli
sys.exit(cli.main(arguments))
"""


@pytest.mark.slow
def test_two_processes(bench: Bench, root: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    output = tmp_path / "results.jsonl"
    arguments = [*bench.args("boolq"), "--mesh", "data=2,fsdp=2", "--json", "--output", str(output)]
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"PYTHONPATH": str(root)}
    for _ in range(2):  # the second time everything is in the results file
        runs = [subprocess.Popen([sys.executable, "-c", _PROCESS, port, str(i), *arguments], env=env,
                                 stdout=subprocess.PIPE, text=True) for i in range(2)]
        printed = [run.communicate(timeout=180)[0].splitlines() for run in runs]
        texts = ["\n".join(line for line in out if not line.startswith("[Gloo]")) for out in printed]
        assert [run.returncode for run in runs] == [0, 0]
        assert texts[1] == ""
        report = json.loads(texts[0])
        assert untimed(report) == untimed(bench.run("boolq").to_json()) | {"accuracy_stderr": report["accuracy_stderr"]}
    assert len(lines(output)) == 13
