"""Output that is never half there: a sibling folder, written, flushed to disk, and then renamed into place."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from llmtool.convert.sidecars.tokenizer_files import PATTERNS
from llmtool.convert.stores.files import sync, sync_all
from llmtool.errors import BadTarget

MARKS = (  # what a folder that --overwrite may replace holds: our manifest, or weights under the names of a layout
    "llmtool-manifest.json", "*.safetensors", "pytorch_model*.bin", "consolidated*.pth", "checkpoints/checkpoint_*",
    "mdl_vars.*", "state/mdl_vars.*", "params/*/.zarray",
)  # fmt: skip
PARTS = (  # and all that it may hold: --overwrite makes a new checkpoint of it, and would lose whatever else is there
    "llmtool-*", "config.json", "params.json", "model.json", "model*.safetensors*", "pytorch_model*.bin*",
    "consolidated*.pth", "checkpoints", "state", "metadata", "params", "mdl_vars.*", "opt_states*", "step", "_sharding",
    *PATTERNS,
)  # fmt: skip


def check_target(target: Path, sources: list[Path], *, overwrite: bool, needed: int) -> list[str]:
    """Everything that speaks against writing ``needed`` bytes to ``target``."""
    problems = []
    parent, real, here = _settled(target).parent, target.resolve(), Path.cwd()
    for source in dict.fromkeys(sources):
        other = source.resolve()
        if real == other or other in real.parents or real in other.parents:
            problems.append(f"the target {target} and {source} are one folder or lie in each other")
    if target.is_symlink() or (target.exists() and not target.is_dir()):  # a device, a socket or a pipe is no folder
        problems.append(f"{target} is a {'link' if target.is_symlink() else 'file'}; expected a folder or nothing")
    elif target.is_mount():
        problems.append(f"{target} is where a disk is mounted and cannot be replaced; give a folder in it")
    elif target.is_dir():
        if real == here or real in here.parents:
            problems.append(f"{target} is, or holds, the folder that you are in; go elsewhere or give a new folder")
        if any(target.iterdir()):
            problems += _against_replacing(target, overwrite)
    ancestor = next(folder for folder in (parent, *parent.parents) if folder.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        problems.append(f"{ancestor} is not a folder that can be written to")
    elif (free := shutil.disk_usage(ancestor).free) < needed:
        problems.append(f"{ancestor} has {free:,} bytes free; the output needs {needed:,}")
    return problems


def _against_replacing(folder: Path, overwrite: bool) -> list[str]:
    if not overwrite:
        return [f"{folder} is not empty; give --overwrite to replace it"]
    if not any(any(folder.glob(mark)) for mark in MARKS):
        return [f"{folder} is not empty and holds no checkpoint that llmtool knows; it is not overwritten"]
    steps = sorted(f"checkpoints/{entry.name}" for entry in folder.glob("checkpoints/*"))
    names = sorted(entry.name for entry in folder.iterdir())
    lost = [name for name in names if not any(fnmatchcase(name, part) for part in PARTS)]
    if lost := (steps if len(steps) > 1 else []) + lost:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        return [
            f"{folder} holds more than the one checkpoint that --overwrite would replace: {', '.join(lost[:5])}{more}; "
            "move that away, or choose another folder"
        ]
    return []


@contextmanager
def new_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a temporary sibling of ``target`` to write into; rename it into place if the block ends well, else remove
    it. With ``overwrite`` the old folder stays until the new one is whole."""
    target = _settled(target)
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    temporary = parent / f".{target.name[:100]}.llmtool-{secrets.token_hex(6)}"
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
        _rename(temporary, target, overwrite)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _settled(target: Path) -> Path:
    """``target`` as a name in its parent's true path, so that a sibling of it lies where it seems to."""
    return target.resolve() if target.name in ("", "..") else target.parent.resolve() / target.name


def _rename(temporary: Path, target: Path, overwrite: bool) -> None:
    old = target.parent / (temporary.name + ".old")
    try:
        if overwrite and target.exists():
            os.rename(target, old)
        os.rename(temporary, target)  # fails on a folder that is not empty: another run was there first
    except BaseException as error:  # Ctrl-C between the two loses nothing either
        if old.exists() and not target.exists():
            os.rename(old, target)
        if not isinstance(error, OSError):
            raise
        kept = f" What was there before is in {old}." if old.exists() else ""
        raise BadTarget(
            f"{target}: cannot be put in place: {error.strerror}; is another conversion writing it?{kept}"
        ) from error
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below ``folder`` to disk, folders after what they hold."""
    walked = [(Path(here), files) for here, _, files in os.walk(folder)]
    sync_all(here / name for here, files in walked for name in files)
    sync_all(here for here, _ in walked)


def write_file(path: Path, data: bytes) -> None:
    """Write a file that is whole or not there: a temporary sibling, flushed to disk, renamed into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
