"""``llmtool pretrain``: from options of three spellings to one run; what is refused; commands for many hosts."""

import shlex
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from llmtool import cli
from llmtool.commands.hosts import HostCommand, host_commands, read_hosts, run_over_ssh
from llmtool.commands.migration import COLOSSAL_SHORT_OPTIONS
from llmtool.commands.pretrain import pretrain
from llmtool.commands.pretrain_options import only_fdl, resolve
from llmtool.errors import BadRun, LlmtoolError
from llmtool.train.config import RunConfig
from llmtool.train.overrides import value_at
from llmtool.train.presets import run_config


def parsed(line: str) -> dict[str, Any]:
    with pretrain.make_context("pretrain", shlex.split(line)) as context:
        return context.params | {"pax": only_fdl(context.params["pax"])}


def run_of(line: str) -> tuple[RunConfig, bool]:
    return resolve(parsed(line), None)


@pytest.mark.parametrize(("option", "path", "value"), [
    ("--steps 7", "steps", 7), ("--seq-len 64", "seq_len", 64), ("--batch-per-device 0.5", "batch_per_device", 0.5),
    ("--grad-accum 4", "grad_accum", 4), ("--learning-rate 1e-5", "optimizer.learning_rate", 1e-5),
    ("--weight-decay 0.2", "optimizer.weight_decay", 0.2), ("--warmup-steps 9", "schedule.warmup_steps", 9),
    ("--clip-norm 0.5", "optimizer.clip_norm", 0.5), ("--clip-norm 0", "optimizer.clip_norm", None),
    ("--seed 3", "seed", 3), ("--tokenizer t.model", "data.tokenizer", "t.model"), ("--text-field body",
     "data.text_field", "body"), ("--pipeline pax", "data.pipeline", "pax"), ("--workers 2", "data.workers", 2),
    ("--mesh data=2,tensor=4", "mesh.ici", (2, 1, 4)), ("--ici-mesh 1,4,2", "mesh.ici", (1, 4, 2)),
    ("--dcn-mesh 1,32,1", "mesh.dcn", (1, 32, 1)), ("--strategy zero2", "strategy", "zero2"),
    ("--strategy ddp", "strategy", "ddp"), ("--offload optimizer", "offload", "optimizer"),
    ("--precision fp16", "precision", "fp16"), ("--remat save_dots", "remat", "save_dots"),
    ("--attention xla", "attention", "xla"), ("--save-every 5", "checkpoint.every_steps", 5),
    ("--save-minutes 2.5", "checkpoint.every_minutes", 2.5), ("--keep 9", "checkpoint.keep", 9),
    ("--log-every 2", "log_every", 2), ("--eval-every 11", "evaluation.every_steps", 11),
    ("--lambada l.jsonl", "evaluation.lambada", "l.jsonl"),
    ("--lambada-every 12", "evaluation.lambada_every_steps", 12),
    ("--lambada-limit 13", "evaluation.lambada_limit", 13), ("--lambada-protocol pax", "evaluation.lambada_protocol",
     "pax"), ("--validation v.txt", "data.validation", ("v.txt",)), ("--epochs 2", "data.epochs", 2.0),
    ("--data a.txt --data 2*b.txt", "data.sources", ("a.txt", "2*b.txt")), ("--set seed=8 --seed 3", "seed", 8),
    # ColossalAI
    ("-p gemini_auto", "offload", "optimizer"), ("-p zero2_cpu --offload none", "offload", "none"),
    ("-p hybrid_parallel", "strategy", "hybrid"), ("-d x.txt", "data.sources", ("x.txt",)),
    ("-e 3", "data.epochs", 3.0), ("-b 8", "batch_per_device", 8.0), ("--lr 3e-4", "optimizer.learning_rate", 3e-4),
    ("--weigth_decay 0.3", "optimizer.weight_decay", 0.3), ("-s 4", "schedule.warmup_steps", 4),
    ("-g", "remat", "full"), ("-l 96", "seq_len", 96), ("-x bf16", "precision", "bf16"),
    ("-i 6", "checkpoint.every_steps", 6), ("--grad_clip 2", "optimizer.clip_norm", 2.0), ("-a", "attention", "auto"),
    # Pax
    ("--fdl.MAX_STEPS=5", "steps", 5), ('--fdl.ICI_MESH_SHAPE="[1,8,1]"', "mesh.ici", (1, 8, 1)),
    ("--fdl.PERCORE_BATCH_SIZE=0.5", "batch_per_device", 0.5), ("--fdl.MAX_STEPS=5 --steps 6", "steps", 6),
])  # fmt: skip
def test_an_option_is_a_choice(option: str, path: str, value: Any) -> None:
    assert value_at(run_of(f"--config llama-tiny {option}")[0], path) == value


def test_names_of_runs() -> None:
    assert run_of("-c 7b")[0].name == "llama2-7b" and run_of("--config Synthetic126M")[0].name == "synthetic-gpt-126m"
    assert run_of("--config gpt-5b --strict-pax")[0] == run_config("gpt-5b", strict_pax=True)
    assert run_of("--config gpt-126m")[0] == run_config("gpt-126m")


def test_a_whole_mesh_replaces_the_presets_own() -> None:
    mesh = run_of("--config gpt-126m --mesh data=4")[0].mesh
    assert (mesh.ici, mesh.dcn) == ((4, 1, 1), (1, 1, 1))


def test_the_file_the_spellings_the_options_and_set_in_this_order(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("steps = 1\nseed = 1\nseq_len = 16\ngrad_accum = 2\n")
    run, _ = run_of(f"--config llama-tiny --config-file {tmp_path}/run.toml --fdl.MAX_STEPS=2 --fdl.MAX_SEQ_LEN=32 "
                    "--seed 3 --steps 3 --set seed=4")
    assert (run.grad_accum, run.seq_len, run.steps, run.seed) == (2, 32, 3, 4)


@pytest.mark.parametrize(("line", "whole"), [
    ("--config llama-tiny", False), ("--config llama-tiny --steps 3", False), ("--config llama-tiny --epochs 2", True),
    ("--config llama-tiny -e 2 --set steps=300", False), ("--config llama-tiny --set data.epochs=2", True)])
def test_who_says_how_long_a_run_is(line: str, whole: bool) -> None:
    assert run_of(line)[1] is whole and run_of(line)[0].steps in (3, 300)


def test_a_saved_run_needs_no_name() -> None:
    saved = run_config("gpt-tiny")
    assert resolve(parsed("--seed 5"), saved)[0].seed == 5
    assert resolve(parsed("--epochs 2"), saved)[1] is True
    with pytest.raises(BadRun, match="which run"):
        run_of("--seed 5")


def test_every_spelling_of_colossalai_is_an_option_of_ours() -> None:
    options = {param.name: param.opts for param in pretrain.params}
    for param, names in COLOSSAL_SHORT_OPTIONS.items():
        assert set(names) <= set(options[param])


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*arguments: object) -> str:
        assert cli.main(["pretrain", *map(str, arguments)]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and "Traceback" not in printed.err
        return printed.err
    return call


@pytest.mark.parametrize(("line", "words"), [
    ("", "where shall the run go?"),
    ("--config lama-tiny --out x", "did you mean llama-tiny"),
    ("--config llama2-7b --out x --mesh data=1", "no data comes with it; say what to train on with --data"),
    ("--config llama-tiny --out x --data synthetic --strict-pax", "does not come from Pax"),
    ("--config llama-tiny --out x --batch-per-devise 3", "--batch-per-device"),
    ("--config llama-tiny --out x -t logs", "tensorboard --logdir OUT"),
    ("--config llama-tiny --out x --fdl_config=Pile126M", "here it is --config"),
    ("--config llama-tiny --out x --fdl.USE_FP8=True", "there is no FP8 yet"),
    ("--config llama-tiny --out x corpus.txt", "data with --data"),
    ("--config llama-tiny --out x --steps 3 --epochs 1", "give one"),
    ("--config llama-tiny --out x --steps 0", "--steps"),
    ("--config llama-tiny --out x --mesh data=2 --ici-mesh 2,1,1", "--mesh is the whole mesh"),
    ("--config llama-tiny --out x -g --remat none", "give one"),
    ("--config llama-tiny --out x -a --attention xla", "give one"),
    ("--config llama-tiny --out x --data synthetic --mesh data=3", "would fit"),
    ("--config llama-tiny --out x --ssh", "--hostfile"),
    ("--config llama-tiny --out x --num-processes 2", "--process-id"),
    ("--config llama-tiny --out x --num-processes 2 --process-id 0", "--coordinator"),
    ("--config llama-tiny --out x --skip-steps 2", "--benchmark"),
    ("--config llama-tiny --benchmark --out x --data y", "has no use for --data, --out"),
    ("--config llama-tiny --resume", "Give its folder"),
    ("--config llama-tiny --resume nowhere", "weights to start from are given with --ckpt"),
    ("--config llama-tiny --resume /tmp --out x", "--ckpt /tmp"),
    ("--out x --resume", "which run?"),
    ("--config llama-tiny --out x --data synthetic --epochs 1", "so no epochs"),
    ("--config llama-tiny --out x --data synthetic --set evaluation.lambada_every_steps=3", "--lambada FILE"),
    ("--config llama-tiny --out x --data synthetic --validation synthetic --set evaluation.every_steps=none",
     "--eval-every"),
])  # fmt: skip
def test_what_cannot_be_is_said_in_a_line(refused: Callable[..., str], line: str, words: str, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused(*shlex.split(line))
    assert not (tmp_path / "x" / "checkpoints").exists()


def test_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two\nnode1\n\nme@node2.cluster  # second\n")
    assert read_hosts(file) == ["node1", "me@node2.cluster"]
    for text, words in (("", "no hosts"), ("a slots=8", "drives all devices"), ("-oProxyCommand=x", "no host's name"),
                        ("a;reboot", "no host's name"), ("a\na", "twice")):
        file.write_text(text)
        with pytest.raises(BadRun, match=words):
            read_hosts(file)


def test_commands_of_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hosts"
    file.write_text("node1\nme@node2\n")
    assert cli.main(["pretrain", "--config", "llama-tiny", "--data", "a b.txt", "--out", "x", "--hostfile", str(file),
                     "--coordinator=node1:99"]) == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if not line.startswith("#"))
    tail = ("-m llmtool pretrain --config llama-tiny --data 'a b.txt' --out x --coordinator node1:99 "
            "--num-processes 2 --process-id ")
    assert first.endswith(tail + "0") and second.endswith(tail + "1") and "JAX_PLATFORMS=cpu" in first
    assert "--coordinator a:12345 --num-processes 2 --process-id 1" in host_commands(["me@a", "b"], [], {})[1].line


def test_over_ssh_one_failure_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With a stand-in for ssh that runs the line here."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$1"\n')
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    run_over_ssh([HostCommand(f"host{i}", f"echo hello {i}") for i in range(2)], [str(ssh)])
    err = capfd.readouterr().err
    assert "host0: hello 0" in err and "host1: hello 1" in err
    wait = shlex.join([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(LlmtoolError, match=r"bad: ended with status 3"):
        run_over_ssh([HostCommand("good", f"exec {wait}"), HostCommand("bad", "exit 3")], [str(ssh)])


def test_help_needs_nothing_heavy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", "--help"]) == 0
    assert "--ici-mesh" in capsys.readouterr().out
    assert all(isinstance(param, click.Parameter) and (param.hidden or param.help or param.name == "pax")
               for param in pretrain.params if isinstance(param, click.Option))
