"""The door: ``llmtool VERB …``.

Commands are plain click commands whose bodies import what they need, so that ``--help`` and shell completion stay
light. Exit status: 0 done (or equal), 1 the answer is no, 2 an error that the user can mend, 130 interrupted, 128 + n
stopped by signal n.
"""

import errno
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import click

from llmtool import __version__
from llmtool.commands.completion import PROGRAM, VARIABLE, completion
from llmtool.commands.convert import convert
from llmtool.commands.data import data
from llmtool.commands.diff import diff
from llmtool.commands.evaluate import evaluate
from llmtool.commands.inspect import inspect
from llmtool.commands.layouts import layouts
from llmtool.commands.plan import plan
from llmtool.commands.presets import presets
from llmtool.commands.pretrain import pretrain
from llmtool.commands.report import report
from llmtool.commands.show import printable
from llmtool.commands.verify import verify
from llmtool.errors import LlmtoolError


@click.group(
    name=PROGRAM,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True},
    epilog="Checkpoints may be in any layout: `llmtool layouts` lists them. More: `llmtool COMMAND --help`.",
)
@click.version_option(__version__, prog_name=PROGRAM)
def cli() -> None:
    """Move LLM checkpoints between Meta, Hugging Face, Pax, Transformer Engine and GGUF, and prove nothing was lost."""


for command in (completion, convert, data, diff, evaluate, inspect, layouts, plan, presets, pretrain, report, verify):
    cli.add_command(command)


class _Stopped(BaseException):
    """A signal that asks to end, raised so that half-written output is taken away on the way out."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line; the exit status. A user's mistake is one message on stderr, never a traceback."""
    arguments = list(sys.argv[1:] if args is None else args)
    _mend_streams()
    if VARIABLE in os.environ:
        cli.main(prog_name=PROGRAM, complete_var=VARIABLE)
    try:
        with _stoppable():
            status = _answer(arguments, as_json="--json" in arguments)
        sys.stdout.flush()
        return status
    except OSError as error:  # of stdout itself
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader went away: `llmtool inspect … | head` is nobody's error
            return 128 + signal.SIGPIPE
        return _fail(f"stdout: {error.strerror}", "OSError", as_json=False)


def _mend_streams() -> None:
    """Make stdout and stderr writable where the shell closed them (``>&-``) or gave them a small alphabet."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open to the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _stoppable() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise, unless someone handles or ignores them (nohup) already."""
    signals = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    ours = [number for number in signals if signal.getsignal(number) == signal.SIG_DFL]

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    try:
        for number in ours:
            signal.signal(number, stop)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _answer(arguments: list[str], as_json: bool) -> int:
    try:
        return _run(arguments)
    except BrokenPipeError:
        raise
    except _Stopped as error:
        number = signal.Signals(error.args[0])
        return _fail(f"stopped by {number.name}", "Stopped", as_json, status=128 + number)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", "Interrupted", as_json, status=130)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.UsageError as error:
        hint = f"\nTry '{error.ctx.command_path} --help'." if error.ctx else ""
        return _fail(error.format_message() + hint, "UsageError", as_json)
    except click.ClickException as error:
        return _fail(error.format_message(), type(error).__name__, as_json)
    except LlmtoolError as error:
        return _fail(str(error), type(error).__name__, as_json, problems=getattr(error, "problems", None))
    except MemoryError:
        return _fail("out of memory: see this job's limit (`ulimit -v`, Slurm's --mem)", "MemoryError", as_json)
    except OSError as error:
        if error.errno is None:
            raise
        return _fail(_describe_os_error(error), "OSError", as_json)


def _run(arguments: list[str]) -> int:
    # click's own main() would answer a broken pipe with 1, which here means "different".
    try:
        with cli.make_context(PROGRAM, arguments) as context:
            cli.invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    return 0


def _describe_os_error(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}no space left; free some, or write to another disk (nothing half-written stays behind)"
    return f"{where}{error.strerror}"


def _fail(message: str, kind: str, as_json: bool, status: int = 2, problems: list[str] | None = None) -> int:
    click.echo(f"{PROGRAM}: {printable(message)}", err=True)
    if as_json:
        report = {"schema": "llmtool.error/1", "error": {"kind": kind, "message": message, "problems": problems or []}}
        click.echo(json.dumps(report, indent=2))
    return status
