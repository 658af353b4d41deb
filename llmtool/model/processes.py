"""Several processes on one job: joining them, and telling all what the first one found."""

import json
import os
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

T = TypeVar("T")


def join_processes(asked: bool = False) -> None:
    """Make the devices of all processes of this job one machine; call it before anything touches a device.

    Joins when ``asked`` to, or when ``srun`` or ``mpirun`` started more than one process. JAX finds coordinator, count
    and index under Slurm, Open MPI, Kubernetes and on TPU pods.
    """
    counts = (os.environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    if (asked or any(count.isdecimal() and int(count) > 1 for count in counts)) and not _joined():
        jax.distributed.initialize()


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
        from llmtool.errors import LlmtoolError

        raise LlmtoolError(message)
    return value


def _joined() -> bool:
    return bool(jax.distributed.is_initialized())
