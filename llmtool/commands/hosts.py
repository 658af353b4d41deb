"""One command for each host of a list: printed, or run over ssh."""

import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtool.errors import BadRun, LlmtoolError

PORT = 12345  # of the coordinator, as Pax' scripts have it
_HOST = re.compile(r"(?:[A-Za-z_][\w.-]*@)?(?:[A-Za-z0-9](?:[\w.-]*\w)?|\[?[0-9A-Fa-f:]+\]?)")
_TOLD = ("JAX_", "XLA_", "NCCL_")  # beginnings of variables that each host gets
_GRACE = 10.0  # seconds that the others have to end by themselves when one has failed


@dataclass(frozen=True)
class HostCommand:
    """What one host is to run, in a shell."""

    host: str
    line: str


def read_hosts(file: str | Path) -> list[str]:
    """The hosts of a file: one a line, ``#`` begins a comment. What follows a name (``slots=8``) is an error: one
    process drives all devices of its host."""
    hosts: list[str] = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 1:
            raise BadRun(f"{file}, line {number}: {' '.join(words[1:])!r} after the host's name; expected the name "
                         "alone, for one process drives all devices of its host")
        if not _HOST.fullmatch(words[0]):
            raise BadRun(f"{file}, line {number}: {words[0]!r} is no host's name")
        if words[0] in hosts:
            raise BadRun(f"{file}, line {number}: {words[0]} is there twice")
        hosts.append(words[0])
    if not hosts:
        raise BadRun(f"{file}: no hosts; expected one a line")
    return hosts


def host_commands(
    hosts: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], coordinator: str | None = None
) -> list[HostCommand]:
    """The command of each host: ``arguments`` of llmtool and which process this is, in the same folder as here, with
    what ``environment`` has for JAX, XLA and NCCL.

    The first host coordinates, at ``coordinator`` (HOST:PORT) or at its own name and :data:`PORT`.
    """
    told = [f"{name}={value}" for name, value in environment.items() if name.startswith(_TOLD)]
    place = coordinator or f"{hosts[0].rpartition('@')[2]}:{PORT}"
    commands = []
    for index, host in enumerate(hosts):
        words = [*(["env", *told] if told else []), sys.executable, "-m", "llmtool", *arguments, "--coordinator", place,
                 "--num-processes", str(len(hosts)), "--process-id", str(index)]
        commands.append(HostCommand(host, f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"))
    return commands


def run_over_ssh(commands: Sequence[HostCommand], ssh: Sequence[str] = ("ssh", "-o", "BatchMode=yes", "-tt")) -> None:
    """Run all at once, each line of output behind its host's name; when one fails the others are ended.

    Raises LlmtoolError with the host that failed first.
    """
    running = [subprocess.Popen([*ssh, command.host, command.line], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, errors="replace") for command in commands]
    threads = [threading.Thread(target=_relay, args=each, daemon=True) for each in zip(commands, running, strict=True)]
    for thread in threads:
        thread.start()
    try:
        failed = _first_failure(running)
    finally:
        _end(running)
    for thread in threads:
        thread.join(_GRACE)
    if failed is not None:
        raise LlmtoolError(f"{commands[failed].host}: ended with status {running[failed].returncode}, and so the run "
                           "on all hosts; its last lines are above")


def _first_failure(running: Sequence[subprocess.Popen[str]]) -> int | None:
    while True:
        statuses = [process.poll() for process in running]
        for index, status in enumerate(statuses):
            if status:
                return index
        if all(status == 0 for status in statuses):
            return None
        time.sleep(0.2)


def _end(running: Sequence[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + _GRACE
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _relay(command: HostCommand, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            print(f"{command.host}: {line.rstrip()}", file=sys.stderr, flush=True)
