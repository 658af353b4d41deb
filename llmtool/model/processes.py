"""Several processes on one job: joining them, and telling all what the first one found."""

import json
import os
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

from llmtool.errors import LlmtoolError

T = TypeVar("T")


SILENCE = 100  # seconds without a sign of life after which a process counts as dead, and the others end
_PATIENCE = 300  # seconds to wait for all processes to come, and for the last to end


def join_processes(
    asked: bool = False,
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    silence: int = SILENCE,
) -> None:
    """Make the devices of all processes of this job one machine; call it before anything touches a device.

    Joins when ``asked`` to, or when ``srun`` or ``mpirun`` started more than one process. JAX finds ``coordinator``
    (HOST:PORT of the first process), ``count`` and ``index`` under Slurm, Open MPI, Kubernetes and on TPU pods, unless
    they are given. When a process dies or is not heard of for ``silence`` seconds, the others end with an error. Raises
    LlmtoolError where the processes do not find together.
    """
    counts = (os.environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    started = any(text.isdecimal() and int(text) > 1 for text in counts)
    if _joined() or not (asked or coordinator or started):
        return
    try:
        jax.distributed.initialize(
            coordinator, count, index, initialization_timeout=_PATIENCE, heartbeat_timeout_seconds=silence,
            shutdown_timeout_seconds=min(silence, _PATIENCE))  # fmt: skip
    except (ValueError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
        raise LlmtoolError(f"the processes of this job do not find together: {said}. Tell them: --coordinator "
                           "HOST:PORT --num-processes N --process-id I") from error


def is_first() -> bool:
    """Whether this is the process that writes files and talks."""
    return jax.process_index() == 0


def from_first(find: Callable[[], T]) -> T:
    """What ``find`` gives in the first process, as JSON values, in all of them. Its error is raised in all."""
    if jax.process_count() == 1:
        return find()
    from jax.experimental.multihost_utils import broadcast_one_to_all

    found, error = None, None
    if is_first():
        try:
            found = find()
        except Exception as raised:  # raised again below, once the others know
            error = raised
    text = np.frombuffer(json.dumps([found, None if error is None else str(error)]).encode(), np.uint8)
    size = int(broadcast_one_to_all(np.array(len(text), np.int32)))
    shared = broadcast_one_to_all(text if is_first() else np.zeros(size, np.uint8))
    value, message = json.loads(bytes(shared))
    if error is not None:
        raise error
    if message is not None:
        raise LlmtoolError(message)
    return value


def _joined() -> bool:
    return bool(jax.distributed.is_initialized())
