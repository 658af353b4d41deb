"""``fit``: series of losses that no interruption changes, what is written when, and where weights come from."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from llmtool.convert import convert_checkpoint, open_checkpoint
from llmtool.errors import BadTarget, Contradiction, LlmtoolError
from llmtool.train import checkpoints
from llmtool.train.batch import Batch
from llmtool.train.config import CheckpointConfig, DataConfig, EvalConfig, RunConfig, ScheduleConfig
from llmtool.train.data import make_loader
from llmtool.train.loop import fit, share
from llmtool.train.metrics_log import read_metrics
from llmtool.train.strategy import place
from tests.test_train_step import here, rows, tiny
from tests.train_small import Numbered, losses, train

RUN = tiny(log_every=1, steps=12, schedule=ScheduleConfig("cosine", warmup_steps=5),
           checkpoint=CheckpointConfig(every_steps=3))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    result = train(folder, run=RUN)
    assert (result.step, result.ended) == (12, "steps") and result.loss == losses(folder)[12]
    return folder


def lines(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if line["kind"] == kind]


@pytest.mark.parametrize("end", [3, 8])  # within the warm-up, and after it
def test_resumed_losses_and_learning_rates_are_the_unbroken_ones(unbroken: Path, tmp_path: Path, end: int) -> None:
    first = train(tmp_path, run=RUN, loader=Numbered(RUN, jax.devices()[:1], end=end))
    assert (first.step, first.ended) == (end, "data")
    loader = Numbered(RUN, jax.devices()[:1])
    train(tmp_path, run=RUN, loader=loader)
    assert loader.given == list(range(end, 12))
    for name in ("loss", "lr", "grad_norm", "skipped"):
        assert [line[name] for line in lines(tmp_path)] == [line[name] for line in lines(unbroken)], name
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 13))


def test_killed_at_any_moment_the_series_is_the_same(unbroken: Path, tmp_path: Path) -> None:
    """kill -9 after step 7: lines of steps after the newest complete checkpoint are made again, not kept."""
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tests.test_train_loop import RUN\n"
        "from tests.train_small import train\n"
        "def on_log(line):\n"
        "    if line['step'] == 7: os.kill(os.getpid(), 9)\n"
        "train(Path(sys.argv[2]), run=RUN, on_log=on_log)\n"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script, root, tmp_path], env=_environment(), timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL and max(losses(tmp_path)) == 7
    train(tmp_path, run=RUN)
    assert losses(tmp_path) == losses(unbroken)


def _environment() -> dict[str, str]:
    """Eight devices as the tests have: what is compiled for one device depends on how many share the cores."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def test_resumed_on_other_devices_it_goes_on_with_the_same_rows(unbroken: Path, tmp_path: Path) -> None:
    run = replace(RUN, steps=6)
    train(tmp_path, run=run)
    wider = replace(RUN, strategy="zero2", batch_per_device=1)
    loader = Numbered(wider, jax.devices()[:4])
    train(tmp_path, 4, run=wider, loader=loader)
    assert loader.given == list(range(6, 12))
    np.testing.assert_allclose(list(losses(tmp_path).values()), list(losses(unbroken).values()), atol=1e-5)


def test_sigterm_saves_and_ends(tmp_path: Path) -> None:
    def on_log(line: Any) -> None:
        if line["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    run = replace(RUN, checkpoint=CheckpointConfig(every_steps=None))
    result = train(tmp_path, run=run, on_log=on_log)
    assert result.ended == "sigterm" and result.step in (4, 5)
    assert checkpoint_steps(tmp_path) == [result.step]
    assert signal.getsignal(signal.SIGTERM) is before
    again = train(tmp_path, run=run)
    assert (again.step, again.ended) == (12, "steps")


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())


def test_saves_come_by_steps_and_by_minutes_and_at_the_end(unbroken: Path, tmp_path: Path) -> None:
    assert checkpoint_steps(unbroken) == [6, 9, 12]  # the newest three
    run = replace(RUN, steps=4, checkpoint=CheckpointConfig(every_steps=None, every_minutes=1e-9, keep=9))
    train(tmp_path, run=run)
    assert checkpoint_steps(tmp_path) == [1, 2, 3, 4]


def test_a_run_that_is_done_does_nothing_more(unbroken: Path) -> None:
    loader = Numbered(RUN, jax.devices()[:1])
    result = train(unbroken, run=RUN, loader=loader)
    assert (result.step, loader.given) == (12, []) and len(losses(unbroken)) == 12


def test_a_folder_with_steps_is_not_begun_anew(unbroken: Path) -> None:
    with pytest.raises(BadTarget, match="holds steps 6, 9, 12"):
        train(unbroken, run=RUN, resume=False)


def test_one_may_go_on_from_an_earlier_step(unbroken: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(unbroken, tmp_path / "run")
    loader = Numbered(RUN, jax.devices()[:1])
    train(tmp_path / "run", run=RUN, loader=loader, resume=6)
    assert loader.given == list(range(6, 12)) and losses(tmp_path / "run") == losses(unbroken)


def test_warm_start_from_any_layout(unbroken: Path, tmp_path: Path) -> None:
    """The first loss is that of the weights given; the step, the schedule and the moments are new."""
    convert_checkpoint(unbroken, tmp_path / "hf", to="hf")
    starts = []
    for number, source in enumerate((unbroken, tmp_path / "hf")):
        folder = tmp_path / f"from{number}"
        result = train(folder, run=replace(RUN, steps=1), init_from=source)
        starts.append(losses(folder)[1])
        assert int(result.state.opt.count) == 1
    assert starts[0] == starts[1] != losses(unbroken)[1]
    with pytest.raises(Contradiction, match=r"rope_theta is 10000\.0 in .*, but 500000\.0"):
        train(tmp_path / "other", run=replace(RUN, model=replace(RUN.model, rope_theta=500000.0)), init_from=unbroken)


def test_pretraining_and_adapting_differ_in_three_values(unbroken: Path, tmp_path: Path) -> None:
    result = train(tmp_path, run=replace(RUN, steps=2), init_from=unbroken, trainable=lambda key: "attn" in key)
    with open_checkpoint(unbroken) as base, open_checkpoint(tmp_path) as adapted:
        np.testing.assert_array_equal(base.weight("embed"), adapted.weight("embed"))
        assert not np.array_equal(base.weight("layers.0.attn.q.w"), adapted.weight("layers.0.attn.q.w"))
    assert set(result.state.opt.m) == {key for key in result.state.params if "attn" in key}


def test_validation_and_scores_are_logged_and_the_best_step_is_known(tmp_path: Path) -> None:
    run = replace(RUN, steps=6, evaluation=EvalConfig(every_steps=2, validation_batches=2, lambada_every_steps=3))
    asked: list[int] = []

    def validation() -> Iterator[Batch]:
        yield from (rows(4, seed=100 + i, counts=[8, 0, 3, 8]) for i in range(5))

    def evaluate(params: Any, step: int) -> dict[str, float]:
        assert params["layers"]["block_0"]["attn"]["q"]["w"].shape[0] == 2
        asked.append(step)
        return {"accuracy": 0.25}

    result = train(tmp_path, run=run, validation=validation, evaluate=evaluate)
    found = {line["step"]: line["loss"] for line in lines(tmp_path, "validation")}
    assert set(found) == {2, 4, 6} and asked == [3, 6]
    assert lines(tmp_path, "evaluation")[0] == {"kind": "evaluation", "step": 3, "accuracy": 0.25}
    assert result.best_validation_loss == min(found.values()) == found[result.best_step or 0]
    assert 2 < found[2] < 5


def test_a_step_without_targets_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Empty(Numbered):
        def __next__(self) -> Batch:
            batch = super().__next__()
            return batch._replace(weights=batch.weights * 0) if self.at == 2 else batch

    run = replace(RUN, steps=3)
    result = train(tmp_path, run=run, loader=Empty(run, jax.devices()[:1]))
    assert "no target counted" in caplog.text
    assert int(result.state.opt.count) == 2 and all(np.isfinite(list(losses(tmp_path).values())))


def test_a_diverged_loss_is_written_as_a_word(tmp_path: Path) -> None:
    class Broken(Numbered):
        def __next__(self) -> Batch:
            batch = super().__next__()
            return batch._replace(weights=batch.weights * np.nan)

    run = replace(RUN, steps=1)
    train(tmp_path, run=run, loader=Broken(run, jax.devices()[:1]))
    assert losses(tmp_path) == {1: "nan"}


def test_a_checkpoint_that_cannot_be_written_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_write", full)
    run = replace(RUN, steps=2000)
    with pytest.raises(checkpoints.SaveFailed, match="No space left"):
        train(tmp_path, run=run)
    assert 3 <= max(losses(tmp_path), default=3) < 1000


def test_the_real_loader_goes_on_exactly(tmp_path: Path) -> None:
    run = tiny(log_every=1, steps=8, data=DataConfig(("synthetic",)), checkpoint=CheckpointConfig(every_steps=4))

    def loader(run: RunConfig) -> Any:
        per, index, count = share(run, place(run, jax.devices()[:1]))
        return make_loader(run.data, tokenizer=None, seq_len=run.seq_len, rows_per_process=per, process_index=index,
                           process_count=count, seed=run.seed, vocab_size=run.model.vocab_size)

    train(tmp_path / "a", run=run, loader=loader(run))
    train(tmp_path / "b", run=replace(run, steps=4), loader=loader(run))
    train(tmp_path / "b", run=run, loader=loader(run))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_loss_falls_on_rows_seen_again(tmp_path: Path) -> None:
    class Same(Numbered):
        def __next__(self) -> Batch:
            return rows(4)

    run = tiny(log_every=1, steps=40)
    result = train(tmp_path, run=run, loader=Same(run, jax.devices()[:1]))
    assert result.loss is not None and result.loss < 0.5 * losses(tmp_path)[1]


# -- several processes -------------------------------------------------------------------------------------------------

PROCESS = """
import sys; sys.path.insert(0, sys.argv[1])
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[3]), initialization_timeout=60,
                           heartbeat_timeout_seconds=10)
from pathlib import Path
from tests.test_train_loop import many, train_many
train_many(Path(sys.argv[4]), *sys.argv[5:])
"""


def many(strategy: Any = "fsdp", steps: int = 20) -> RunConfig:
    return tiny(log_every=1, steps=steps, strategy=strategy, batch_per_device=1, checkpoint=CheckpointConfig(5))


def train_many(folder: Path, strategy: str, die_at: str = "0", stop_at: str = "0") -> None:
    """What each process of two runs; the second dies at a step, or the first hears SIGTERM, if told to."""
    run = many(strategy, steps=20 if stop_at == "0" else 5000)

    class Mortal(Numbered):
        def __next__(self) -> Batch:
            if self.at == int(die_at) > 0 and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__next__()

    def on_log(line: Any) -> None:  # seen by the first process alone
        if line["step"] == int(stop_at):
            os.kill(os.getpid(), signal.SIGTERM)

    result = fit(run, workdir=folder, loader=Mortal(run), on_log=on_log)
    print(result.ended, result.step, flush=True)


def two_processes(folder: Path, *words: str, limit: int = 400) -> list[int]:
    """Their exit codes."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parent.parent
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    processes = [
        subprocess.Popen([sys.executable, "-c", PROCESS, root, str(port), str(i), folder, *words], env=environment)
        for i in range(2)
    ]
    try:
        return [process.wait(limit) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "hybrid"])
def test_two_processes_train_as_one(tmp_path: Path, strategy: str) -> None:
    assert two_processes(tmp_path / "two", strategy) == [0, 0]
    one = replace(many(strategy), batch_per_device=8)
    train(tmp_path / "one", run=one)
    np.testing.assert_allclose(list(losses(tmp_path / "two").values()), list(losses(tmp_path / "one").values()),
                               atol=1e-5)
    with open_checkpoint(tmp_path / "one") as a, open_checkpoint(tmp_path / "two") as b:
        for name in ("embed", "layers.1.mlp.down.w", "norm.scale"):
            np.testing.assert_allclose(a.weight(name), b.weight(name), atol=1e-5)
    longer = replace(one, steps=21)  # and what two saved, one goes on from
    assert train(tmp_path / "two", run=longer).step == 21


@pytest.mark.slow
def test_a_dead_peer_ends_the_other_with_an_error(tmp_path: Path) -> None:
    began = time.monotonic()
    codes = two_processes(tmp_path, "fsdp", "7")
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, None)
    assert time.monotonic() - began < 200 and checkpoint_steps(tmp_path) == [5]


@pytest.mark.slow
def test_sigterm_in_one_process_ends_all_after_one_step(tmp_path: Path) -> None:
    assert two_processes(tmp_path, "fsdp", "0", "6") == [0, 0]
    last = max(checkpoint_steps(tmp_path))
    assert 6 <= last < 5000 and max(losses(tmp_path)) == last
    with open_checkpoint(tmp_path) as saved:
        assert saved.step == last


def test_problems_are_told_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(LlmtoolError, match="would fit"):
        train(tmp_path / "none", 8, run=replace(RUN, batch_per_device=0.5, strategy="fsdp"), loader=object())
    assert not (tmp_path / "none").exists()
    assert here(RUN).mesh.size == 1
