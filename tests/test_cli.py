"""The door: light to open, one message for a user's mistake, exit status that scripts can trust."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtool import __version__, cli
from llmtool.commands.convert import job_of
from llmtool.commands.options import complete_word
from llmtool.commands.show import fold, printable
from llmtool.errors import BadCheckpoint, PlanError

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = sorted(cli.cli.commands)
HEAVY = ("jax", "torch", "numpy", "tensorstore", "transformers", "ml_dtypes", "rich", "safetensors", "gguf")


def loaded_by(*args: str) -> list[str]:
    """Which heavy packages one command line imports."""
    code = (f"import sys\nfrom llmtool.cli import main\nstatus = main({list(args)!r})\n"
            f"print('LOADED', [m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)\nsys.exit(status)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return eval(done.stderr.rpartition("LOADED ")[2])


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["convert", "--help"], ["inspect", "--help"],
                                  ["completion", "bash"]], ids=" ".join)
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    assert loaded_by(*args) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: llmtool {command}")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"llmtool, version {__version__}\n"


def test_no_arguments_show_the_help_as_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("Usage: llmtool")


@pytest.mark.parametrize("args, said", [
    (["konvert"], "konvert"),
    (["convert", "only-source"], "missing DST, --to LAYOUT"),
    (["convert", "a", "b", "--to", "hf", "--dtype", "int3"], "int3"),
    (["convert", "a", "b", "--to", "hf", "--direction", "fw2te"], "not both"),
    (["convert", "--direction", "fw2te", "--fw", "pax"], "--input-path, --output-path"),
    (["convert", "--num-of-layer", "0"], "--num-of-layer"),
    (["diff", "a"], "B"),
    (["diff", "a", "b", "--tolerance", "-1"], "-1"),
    (["completion", "tcsh"], "tcsh"),
])
def test_usage_errors(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("llmtool: ")
    assert said in captured.err
    assert "Traceback" not in captured.err


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch):
    """Make ``llmtool inspect`` meet an error."""
    def arm(error: BaseException) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise error
        monkeypatch.setattr("llmtool.convert.open_checkpoint", fail, raising=False)
    return arm


@pytest.mark.parametrize("error, status, said", [
    (BadCheckpoint("a/b.safetensors: cut short"), 2, "llmtool: a/b.safetensors: cut short\n"),
    (PlanError("cannot convert", ["one", "two"]), 2, "llmtool: cannot convert\n  - one\n  - two\n"),
    (PermissionError(13, "Permission denied", "/x/y"), 2, "llmtool: /x/y: Permission denied\n"),
    (OSError(28, "No space left on device", "/x"), 2, "llmtool: /x: no space left; free some"),
    (MemoryError(), 2, "llmtool: out of memory"),
    (KeyboardInterrupt(), 130, "llmtool: interrupted\n"),
])
def test_a_mistake_is_one_message(raising, error, status, said, capsys) -> None:
    raising(error)
    assert cli.main(["inspect", "x"]) == status
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith(said)


def test_a_mistake_under_json_is_one_object(raising, capsys) -> None:
    raising(PlanError("cannot convert", ["one", "two"]))
    assert cli.main(["inspect", "x", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "schema": "llmtool.error/1",
        "error": {"kind": "PlanError", "message": "cannot convert\n  - one\n  - two", "problems": ["one", "two"]},
    }
    assert captured.err.startswith("llmtool: cannot convert")


def test_a_bug_keeps_its_traceback(raising) -> None:
    raising(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["inspect", "x"])


def test_messages_cannot_steer_the_terminal(raising, capsys) -> None:
    raising(BadCheckpoint("key \x1b[2J\x07 is unknown"))
    assert cli.main(["inspect", "x"]) == 2
    assert capsys.readouterr().err == "llmtool: key \\x1b[2J\\x07 is unknown\n"
    assert printable("naïve – ok\nnext") == "naïve – ok\nnext"


def test_a_closed_pipe_is_quiet() -> None:
    code = "import sys; from llmtool.cli import main; sys.exit(main(['layouts', '--json']))"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    stderr = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=60) in (0, 141)  # 0: all of it fitted into the pipe before it closed
    assert stderr == b""


@pytest.mark.parametrize("equal, status", [(True, 0), (False, 1)])
def test_diff_answers_with_its_exit_status(equal, status, monkeypatch, capsys) -> None:
    found = {"schema": "llmtool.diff/1", "equal": equal, "max_abs_diff": 0.0 if equal else 0.25, "a": "a", "b": "b",
             "tolerance": 0.0, "weights": 3, "missing": [], "extra": [] if equal else ["norm.bias"], "mismatched": [],
             "dtypes": [], "notes": []}
    answer = SimpleNamespace(equal=equal, to_json=lambda: found)
    monkeypatch.setattr("llmtool.convert.diff_checkpoints", lambda a, b, **_: answer, raising=False)
    assert cli.main(["diff", "a", "b", "--json"]) == status
    assert json.loads(capsys.readouterr().out) == found
    assert cli.main(["diff", "a", "b"]) == status
    assert ("equal" if equal else "different") in capsys.readouterr().out


def test_layouts(capsys) -> None:
    assert cli.main(["layouts", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [layout["name"] for layout in found["layouts"]] == ["hf", "meta", "pax", "te", "native", "gguf"]
    assert cli.main(["layouts"]) == 0
    table = capsys.readouterr().out
    assert "act_first" in table
    assert "kv_packed" in table


@pytest.mark.parametrize("incomplete, words", [
    ("", ["hf", "meta", "pax", "te", "native"]),
    ("n", ["native"]),
    ("meta:", ["meta:shards=", "meta:split="]),
    ("te:gate=", ["te:gate=act_first", "te:gate=linear_first"]),
    ("te:gate=l", ["te:gate=linear_first"]),
    ("te:gate=linear_first,qk", ["te:gate=linear_first,qkv="]),
    ("te:gate=linear_first,gat", []),
    ("meta:shards=", []),
    ("nonsense:", []),
])
def test_layout_words_complete_piece_by_piece(incomplete: str, words: list[str]) -> None:
    assert [word for word, _ in complete_word(incomplete, target=True)] == words


def test_a_read_only_layout_completes_as_a_source_alone() -> None:
    assert [word for word, _ in complete_word("g", target=False)] == ["gguf"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_scripts(shell: str, capsys) -> None:
    assert cli.main(["completion", shell]) == 0
    assert f"_LLMTOOL_COMPLETE={shell}_complete" in capsys.readouterr().out


@pytest.mark.parametrize("line, replies", [
    ("llmtool insp", ["inspect"]),
    ("llmtool convert a b --to m", ["meta"]),
    ("llmtool convert a b --to te:ga", ["gate="]),
    ("llmtool convert a b --to te:gate=", ["act_first", "linear_first"]),
    ("llmtool convert a b --to te:gate=act_first,qkv=k", ["kv_packed"]),
    ("llmtool convert 'a folder' b --to h", ["hf"]),
    ("llmtool convert --dir", ["--direction"]),
    ("llmtool inspect x --model-config gpt-1", ["gpt-126m", "gpt-175b"]),
    ("llmtool inspect ", []),
])
def test_bash_completes_through_its_word_breaks(line: str, replies: list[str], tmp_path: Path) -> None:
    launcher = tmp_path / "llmtool"
    launcher.write_text(f"#!/bin/sh\nexec {sys.executable} -m llmtool \"$@\"\n")
    launcher.chmod(0o755)
    script = ('eval "$(llmtool completion bash)"; compopt() { :; }\n'
              'COMP_LINE=$LINE COMP_POINT=${#LINE}; _llmtool_completion; printf "%s\\n" "${COMPREPLY[@]}"')
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LINE": line}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, timeout=60)
    assert done.stderr == ""
    assert done.stdout.split() == replies


def test_what_differs_in_layer_numbers_alone_shares_a_line() -> None:
    rows = [(f"layers.{i}.w -> x_{i}[{i}]", "f32") for i in (0, 1, 2, 5)] + [("norm.{}", "f32"), ("norm.w", "f16")]
    assert list(fold(rows)) == [
        ("layers.{0,1,2,5}.w -> x_{0,1,2,5}[{0,1,2,5}]", "f32", 4), ("norm.{}", "f32", 1), ("norm.w", "f16", 1)]
    assert list(fold((f"layers.{i}", None) for i in range(3))) == [("layers.{0..2}", None, 3)]


def documented_commands() -> list[tuple[str, str]]:
    """Every ``llmtool`` line in the code blocks of the README and the guides."""
    guides = [ROOT / "README.md", *sorted(ROOT.glob("*/README.md")), ROOT / "CONTRIBUTING.md"]
    found = []
    for guide in guides:
        for block in re.findall(r"^```bash\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("llmtool "):
                    found.append((str(guide.relative_to(ROOT)), " ".join(line.partition("#")[0].split())))
    return found


@pytest.mark.parametrize("guide, line", documented_commands())
def test_documented_commands_parse(guide: str, line: str) -> None:
    words = shlex.split(line.partition(" > ")[0])[1:]
    with cli.cli.make_context("llmtool", words) as group:
        name, command, rest = cli.cli.resolve_command(group, words)
        assert command is not None
        with command.make_context(name, list(rest), parent=group) as context:
            if name == "convert":
                assert job_of(context.params)
