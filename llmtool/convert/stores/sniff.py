"""Things that lie where a weight file should be, recognised by their first bytes."""

from pathlib import Path

from llmtool.errors import BadCheckpoint

_HTML = (b"<!doctype", b"<html", b"<?xml")


def refuse_impostors(path: Path) -> None:
    """Raise BadCheckpoint if ``path`` is absent, not a plain file, empty, a Git LFS pointer or a web page.

    A failed download leaves one of these under the right name; a parser would report it as a broken header.
    """
    try:
        if not path.is_file():  # a pipe or a device would block the open below
            found = "not a plain file" if path.exists() else "a broken link" if path.is_symlink() else "missing"
            raise BadCheckpoint(f"{path}: {found}, a weight file was expected")
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read: {error.strerror}") from error
    if not head:
        raise BadCheckpoint(f"{path}: the file is empty (0 bytes). Download or copy it again.")
    if head.startswith(b"version https://git-lfs"):
        raise BadCheckpoint(f"{path}: a Git LFS pointer, not the weights. Run `git lfs pull` where it was cloned.")
    if head.lstrip().lower().startswith(_HTML):
        raise BadCheckpoint(f"{path}: a web page, not weights (a login or error page?). Download it again.")


def is_plain_name(name: str) -> bool:
    """Whether ``name`` names something in a folder, and nothing above, below or outside of it."""
    return name not in ("", ".", "..") and not any(mark in name for mark in "/\\\0") and len(name.encode()) <= 255


def refuse_odd_name(key: str, where: str) -> None:
    """Raise BadCheckpoint for an array name that cannot be printed as it is (control characters, lone surrogates)."""
    if not key.isprintable() or len(key) > 1000:
        raise BadCheckpoint(f"{where}: holds an array named {key[:80]!a}, which is no name of a weight")
