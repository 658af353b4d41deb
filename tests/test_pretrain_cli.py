"""``llmtool pretrain`` from text to a checkpoint that every other command takes; benchmark, events, processes."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from llmtool import cli
from llmtool.convert.sidecars.protobuf import fields
from llmtool.train.event_file import EventFile, crc32c
from tests.small_tokenizers import WORDS, sentencepiece_model

SMALL = ["--set", "model.d_model=32", "--set", "model.n_layers=2", "--set", "model.d_ff=48", "--set",
         "model.head_dim=8", "--seq-len", 32, "--batch-per-device", 1, "--log-every", 1]  # fmt: skip
PRETRAIN_KEYS = {"schema", "name", "out", "parameters", "devices", "step", "steps", "ended", "loss", "best_step",
                 "best_validation_loss", "tokens_per_second", "max_memory_bytes", "seconds", "notes"}


@pytest.fixture(autouse=True, scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of one shape share a compiled step, which is most of the time that they take here."""
    import jax

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("compiled")), 0.5), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus, a validation text, a tokenizer and LAMBADA passages."""
    lines = WORDS.split("\n")
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines * 60))
    (tmp_path / "valid.txt").write_text("<|endoftext|>".join(lines * 12))
    (tmp_path / "my.model").write_bytes(sentencepiece_model(400))
    (tmp_path / "lambada.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return tmp_path


def words(folder: Path, out: str, *more: object) -> list[str]:
    return [str(word) for word in (
        "pretrain", "--config", "llama-tiny", *SMALL, "--data", folder / "corpus.jsonl", "--tokenizer",
        folder / "my.model", "--out", folder / out, *more)]  # fmt: skip


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Run a command line: stdout and stderr."""
    def call(arguments: list[str], status: int = 0) -> tuple[str, str]:
        assert cli.main(arguments) == status, capsys.readouterr().err
        return capsys.readouterr()
    return call


def metrics(path: Path, kind: str = "train") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def losses(path: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(path)}


def read_events(file: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, tag -> value) of each event, checksums looked at."""
    data, out, at = file.read_bytes(), [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = data[at + 12:at + 12 + length]
        for piece, sum_at in ((data[at:at + 8], at + 8), (event, at + 12 + length)):
            crc = crc32c(piece)
            assert struct.unpack_from("<I", data, sum_at)[0] == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
        at += 16 + length
        parts = {number: payload for number, _, payload in fields(event)}
        values = {}
        for number, _, value in fields(parts.get(5, b"")):
            inner = {n: payload for n, _, payload in fields(value)}
            assert number == 1
            values[inner[1].decode()] = struct.unpack("<f", inner[2])[0]
        step = next((event[10:][:1][0] for number, _, _ in fields(event) if number == 2), 0)
        out.append((step, values))
    return out


def test_from_text_to_a_model_that_all_commands_take(folder: Path, run: Callable[..., tuple[str, str]]) -> None:
    out = folder / "run"
    told, err = run(words(folder, "run", "--steps", 4, "--validation", folder / "valid.txt", "--eval-every", 2,
                          "--lambada", folder / "lambada.jsonl", "--lambada-every", 4, "--save-every", 2, "--json"))
    report = json.loads(told)
    assert set(report) == PRETRAIN_KEYS and report["schema"] == "llmtool.pretrain/1"
    assert (report["step"], report["ended"], report["devices"]) == (4, "steps", 8)
    assert report["loss"] == losses(out)[4] and report["tokens_per_second"] > 0 and report["max_memory_bytes"] > 1e7
    assert [line["step"] for line in metrics(out, "validation")] == [2, 4]
    best = min(metrics(out, "validation"), key=lambda line: line["loss"])
    assert (report["best_step"], report["best_validation_loss"]) == (best["step"], best["loss"])
    for words_ in ("step 1/4: loss", "tokens/s", "sequences/s", "TFLOP/s a device", "left", "grad norm", "lr 0.00015",
                   "step 4: validation: loss", "step 4: evaluation: lambada accuracy"):
        assert words_ in err
    assert json.loads((out / "run.json").read_text())["schema"] == "llmtool.run/1"
    (train,), (evals,) = (list((out / "summaries" / name).glob("events.out.tfevents.*")) for name in ("train", "eval"))
    events = [each for each in read_events(train) if each[1]]
    assert [step for step, _ in events] == [1, 2, 3, 4]
    assert events[2][1]["total_loss"] == np.float32(losses(out)[3])
    assert {"learning/lr", "learning/raw_grad_norm", "learning/clipped_grad_norm", "learning/is_valid_step",
            "avg_xent", "log_pplx", "num_predictions", "Steps/sec", "speed/tokens_per_second"} <= set(events[0][1])
    assert {tag for _, values in read_events(evals) for tag in values} == {
        "total_loss", "avg_xent", "log_pplx", "lambada_accuracy", "lambada_accuracy_stderr", "lambada_perplexity"}

    scored = json.loads(run(["eval", "lambada", "--ckpt", str(out), "--data", str(folder / "lambada.jsonl"), "--json",
                             "-q", "--mesh", "data=8"])[0])
    (within,) = metrics(out, "evaluation")
    assert scored["accuracy"] == within["lambada_accuracy"]
    assert scored["perplexity"] == pytest.approx(within["lambada_perplexity"], rel=1e-4)

    run(["convert", str(out), str(folder / "hf"), "--to", "hf", "-q"])
    same_logits(folder / "hf", out)


def same_logits(hf: Path, ours: Path) -> None:
    """transformers' own model gives the logits of ours."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llmtool.evaluate.loading import Model
    from llmtool.model.decoder import Decoder

    theirs = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    assert len(AutoTokenizer.from_pretrained(hf)("the red boat").input_ids) > 1
    ids = np.arange(3, 35)[None] % 400
    with Model.open(ours, mesh="data=8") as model, torch.no_grad():
        found = Decoder(model.config).apply({"params": model.params("float32")}, ids)
        expected = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(np.asarray(found), expected, atol=2e-5)


def test_going_on_is_as_never_having_stopped(folder: Path, run: Callable[..., tuple[str, str]]) -> None:
    """By the newest checkpoint, by a step's number, and by the folder alone."""
    run(words(folder, "whole", "--steps", 4, "--save-every", 2, "-q"))
    run(words(folder, "parts", "--steps", 4, "--save-every", 2, "-q", "--resume"))  # nothing there yet: a new run
    whole = losses(folder / "whole")
    assert losses(folder / "parts") == whole
    run(["pretrain", "--resume", "2", "--out", str(folder / "parts"), "-q"])
    assert losses(folder / "parts") == whole
    out, err = run(["pretrain", "-f", str(folder / "parts"), "--set", "steps=5"])
    assert "other than before: steps = 5 (was 4)" in err and "5 of 5" in out
    assert set(losses(folder / "parts")) == {1, 2, 3, 4, 5}
    err = run(words(folder, "parts"), status=2)[1]
    assert "resume it" in err
    err = run(words(folder, "parts", "--resume", "3"), status=2)[1]
    assert "no complete step 3; there are: 2, 4, 5" in err


def test_weights_of_another_layout_are_where_it_starts(folder: Path, run: Callable[..., tuple[str, str]]) -> None:
    measured = ["--validation", folder / "valid.txt", "--eval-every", 1, "-q"]
    run(words(folder, "first", "--steps", 3, *measured))
    run(["convert", str(folder / "first"), str(folder / "meta"), "--to", "meta", "-q"])
    frozen = ["--learning-rate", 0, "--steps", 1, "--ckpt", folder / "meta"]
    run(words(folder, "second", *frozen, *measured))
    before, after = (metrics(folder / name, "validation")[-1]["loss"] for name in ("first", "second"))
    assert after == pytest.approx(before, rel=1e-6)
    err = run(words(folder, "third", *frozen, "--set", "model.n_layers=1"), status=2)[1]
    assert "n_layers is 2 in " in err and "but 1 in the model config given" in err


def test_epochs_make_the_steps(folder: Path, run: Callable[..., tuple[str, str]]) -> None:
    told = json.loads(run(words(folder, "run", "--epochs", 0.2, "--json", "-q"))[0])
    assert told["ended"] == "steps" and 1 <= told["steps"] == told["step"] < 300
    assert metrics(folder / "run")[-1]["lr"] > 0


def test_what_the_data_lack_is_said_before_anything_is_trained(
    folder: Path, run: Callable[..., tuple[str, str]]
) -> None:
    line = words(folder, "run")
    at = line.index("--tokenizer")
    assert "text needs a tokenizer; name one with --tokenizer" in run(line[:at] + line[at + 2:], status=2)[1]
    assert "nothing to read here" in run([*line, "--data", "jsonl:nowhere.jsonl"], status=2)[1]
    assert not (folder / "run").exists()


def test_variables_of_pax_scripts_are_named(
    folder: Path, run: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOCAB_PATH", "x")
    err = run(words(folder, "run", "--steps", 1))[1]
    assert "note: VOCAB_PATH is set, but is not read here: use --tokenizer" in err


def test_benchmark(run: Callable[..., tuple[str, str]]) -> None:
    line = [str(word) for word in ("pretrain", "--config", "llama-tiny", *SMALL[:-2], "--benchmark", "--steps", 2)]
    told = json.loads(run([*line, "--json", "-q"])[0])
    assert (told["schema"], told["steps"], told["skipped"], told["devices"]) == ("llmtool.benchmark/1", 2, 2, 8)
    assert told["sequences_per_step"] == 8 and told["mfu"] is None
    assert told["tokens_per_second"] == pytest.approx(8 * 32 / told["step_seconds"])
    assert told["sequences_per_second"] == pytest.approx(8 / told["step_seconds"])
    flops = told["flops_per_token"] * told["tokens_per_second"] / 8
    assert told["tflops_per_device"] == pytest.approx(flops / 1e12)
    out = run([*line, "--skip-steps", "1"])[0]
    assert "2 steps after 1" in out and "TFLOP/s a device" in out


def test_event_files(tmp_path: Path) -> None:
    """The checksum's published value; a step of two bytes; the start that hides an earlier life's events."""
    assert crc32c(b"123456789") == 0xE3069283
    file = EventFile(tmp_path / "a" / "b", 300)
    file.scalars(301, {"loss": 1.5, "x/y": -2.0})
    file.close()
    data = file.path.read_bytes()
    assert b"brain.Event:2" in data and b"\x10\xac\x02\x3a\x02\x08\x01" in data  # step 300, session_log: START
    assert read_events(file.path)[-1][1] == {"loss": 1.5, "x/y": -2.0}


def spawn(root: Path, arguments: list[str], devices: int) -> subprocess.Popen[str]:
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "PYTHONPATH": str(root)}
    return subprocess.Popen([sys.executable, "-m", "llmtool", *arguments], env=env, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def peers(root: Path, arguments: list[str], devices: int) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    return [spawn(root, [*arguments, "--coordinator", place, "--num-processes", "2", "--process-id", str(i),
                         "--peer-timeout", "20"], devices) for i in range(2)]


def wait_for_step(path: Path, step: int) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if (path / "metrics.jsonl").exists() and max(losses(path), default=0) >= step:
            return
        time.sleep(0.2)
    pytest.fail(f"{path}: step {step} was not reached")


@pytest.mark.slow
def test_two_processes_are_as_one(folder: Path, root: Path, run: Callable[..., tuple[str, str]]) -> None:
    """Four devices each, over loopback: the losses of eight in one process; only the first talks."""
    run(words(folder, "one", "--steps", 5, "-q"))
    both = peers(root, words(folder, "two", "--steps", 5, "--json"), 4)
    (out, err), (other_out, other_err) = (process.communicate(timeout=240) for process in both)
    assert [process.returncode for process in both] == [0, 0], err + other_err
    said = [line for text in (other_out, other_err) for line in text.splitlines() if not line.startswith("[Gloo]")]
    assert said == []
    assert json.loads("\n".join(line for line in out.splitlines() if not line.startswith("[Gloo]")))["devices"] == 8
    assert "step 5/5" in err
    found = losses(folder / "two")
    assert found == pytest.approx(losses(folder / "one"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_peer_ends_the_other(folder: Path, root: Path, victim: int) -> None:
    both = peers(root, words(folder, "run", "--steps", 100_000), 1)
    try:
        wait_for_step(folder / "run", 5)
        both[victim].kill()
        _, err = both[1 - victim].communicate(timeout=60)
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert both[1 - victim].returncode != 0
    assert "another process of this run has ended" in err or "heartbeat" in err


@pytest.mark.slow
def test_sigterm_saves_and_going_on_is_exact(folder: Path, root: Path, run: Callable[..., tuple[str, str]]) -> None:
    line = words(folder, "stopped", "--steps", 60, "--mesh", "data=8")
    process = spawn(root, line, 8)
    wait_for_step(folder / "stopped", 3)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143 and "stopped by SIGTERM; --resume goes on" in out, err
    run([*line, "--resume", "-q"])
    run(words(folder, "whole", "--steps", 60, "--mesh", "data=8", "-q"))
    assert losses(folder / "stopped") == losses(folder / "whole")


@pytest.mark.slow
@pytest.mark.shared
def test_a_tiny_llama_learns_real_text(shared: Path, root: Path, tmp_path: Path) -> None:
    """In one process and on one device, as a user would have it: below what letters' frequencies tell."""
    text = (shared / "data" / "text" / "tinyshakespeare.txt").read_text()
    (tmp_path / "train.txt").write_text(text[:-100_000])
    (tmp_path / "valid.txt").write_text(text[-100_000:])

    def call(*arguments: object) -> str:
        process = spawn(root, [str(word) for word in arguments], 1)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        return out

    call("data", "train-tokenizer", tmp_path / "train.txt", tmp_path / "my.model", "--vocab-size", 512)
    report = json.loads(call(
        "pretrain", "--config", "llama-tiny", "--data", tmp_path / "train.txt", "--validation", tmp_path / "valid.txt",
        "--tokenizer", tmp_path / "my.model", "--out", tmp_path / "run", "--steps", 120, "--json"))  # fmt: skip
    from llmtool.evaluate.tokenizer import load_tokenizer

    ids = np.array(load_tokenizer(tmp_path / "my.model").encode_plain(text[:-100_000]))
    share = np.bincount(ids, minlength=512)[np.unique(ids)] / len(ids)
    assert report["best_validation_loss"] < -np.sum(share * np.log(share)) - 0.5
    scored = json.loads(call("eval", "lambada", "--ckpt", tmp_path / "run", "--data",
                             shared / "data" / "lambada" / "lambada_test.jsonl", "--limit", 20, "--json"))
    assert scored["n"] == 20
    call("convert", tmp_path / "run", tmp_path / "hf", "--to", "hf")
    same_logits(tmp_path / "hf", tmp_path / "run")
