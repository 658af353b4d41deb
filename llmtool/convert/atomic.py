"""Output that is never half there: a sibling folder, written, flushed to disk, and then renamed into place."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtool.errors import BadTarget

MARKS = (  # what a folder that --overwrite may replace holds: our manifest, or weights under the names of a layout
    "llmtool-manifest.json", "*.safetensors", "pytorch_model*.bin", "consolidated*.pth", "checkpoints/checkpoint_*",
    "mdl_vars.*", "state/mdl_vars.*", "params/*/.zarray",
)  # fmt: skip


def check_target(target: Path, sources: list[Path], *, overwrite: bool, needed: int) -> list[str]:
    """Everything that speaks against writing ``needed`` bytes to ``target``."""
    problems = []
    parent = target.absolute().parent
    real = target.resolve()
    for source in sources:
        other = source.resolve()
        if real == other or other in real.parents or real in other.parents:
            problems.append(f"the target {target} and {source} are one folder or lie in each other")
    if target.is_symlink() or (target.exists() and not target.is_dir()):  # a device, a socket or a pipe is no folder
        problems.append(f"{target} is a {'link' if target.is_symlink() else 'file'}; expected a folder or nothing")
    elif target.is_dir() and any(target.iterdir()):
        if not overwrite:
            problems.append(f"{target} is not empty; give --overwrite to replace it")
        elif not _looks_like_a_checkpoint(target):
            problems.append(f"{target} is not empty and holds no checkpoint that llmtool knows; it is not overwritten")
    ancestor = next(folder for folder in (parent, *parent.parents) if folder.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        problems.append(f"{ancestor} is not a folder that can be written to")
    elif (free := shutil.disk_usage(ancestor).free) < needed:
        problems.append(f"{ancestor} has {free:,} bytes free; the output needs {needed:,}")
    return problems


def _looks_like_a_checkpoint(folder: Path) -> bool:
    return any(any(folder.glob(mark)) for mark in MARKS)


@contextmanager
def new_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a temporary sibling of ``target`` to write into; rename it into place if the block ends well, else remove
    it. With ``overwrite`` the old folder stays until the new one is whole."""
    parent = target.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    temporary = parent / f".{target.name[:100]}.llmtool-{secrets.token_hex(6)}"
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
        _rename(temporary, target, overwrite)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename(temporary: Path, target: Path, overwrite: bool) -> None:
    old = target.absolute().parent / (temporary.name + ".old")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise BadTarget(f"{target}: became a file while the output was written; it is left alone")
    if overwrite and target.exists():
        os.rename(target, old)
    try:
        os.rename(temporary, target)  # fails on a folder that is not empty: another run was there first
    except OSError as error:
        if old.exists():
            os.rename(old, target)
        raise BadTarget(
            f"{target}: cannot be put in place: {error.strerror}; is another conversion writing it?"
        ) from error
    sync(target.absolute().parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below ``folder`` to disk."""
    for here, _, files in os.walk(folder):
        for name in files:
            sync(Path(here, name))
        sync(Path(here))


def sync(path: Path) -> None:
    """Flush one file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
