"""Source words: ``[WEIGHT*][KIND:]PATH[@SPLIT]``."""

import glob
import math
import re
from dataclasses import dataclass
from pathlib import Path

from llmtool.errors import BadData

KINDS = ("jsonl", "text", "tokens", "tfds", "hf", "synthetic")
JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".ndjson")
TEXT = (".txt", ".text", ".md")
SIDECAR = "tokens.json"  # of a folder of token files
_WEIGHT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*\*\s*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Word:
    """``split`` is of TFDS and Hugging Face data sets."""

    kind: str
    path: str = ""
    weight: float | None = None  # as the user gave it
    split: str = "train"

    def __str__(self) -> str:
        split = f"@{self.split}" if self.split != "train" else ""
        return f"{self.kind}:{self.path}{split}" if self.path else self.kind


def parse_word(text: str) -> Word:
    """``0.7*jsonl:data/*.jsonl``, ``tfds:c4/en/3.1.0@validation``, ``synthetic``. Without a kind the path tells it."""
    matched = _WEIGHT.fullmatch(text)
    weight, rest = (float(matched[1]), matched[2]) if matched else (None, text)
    if weight is not None and not 0 < weight < math.inf:
        raise BadData(f"{text}: the weight is {weight:g}; expected more than 0, or leave the source out")
    kind, colon, path = rest.partition(":")
    if rest == "synthetic":
        return Word(rest, weight=weight)
    if not colon or kind not in KINDS[:-1]:
        kind, path = _guess(rest, text) if rest else "", rest
    split = "train"
    if kind in ("tfds", "hf") and "@" in path:
        path, _, split = path.rpartition("@")
    if not path or not split:
        raise BadData(f"{text}: no path; expected KIND:PATH with one of {', '.join(KINDS[:-1])}, or synthetic")
    return Word(kind, path, weight, split)


def _guess(path: str, text: str) -> str:
    folder = Path(path.rpartition("@")[0] or path)
    if folder.is_dir():
        if (folder / SIDECAR).is_file():
            return "tokens"
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file() or _holds(folder, ".parquet"):
            return "hf"
        if (folder / "features.json").is_file():
            return "tfds"
        if any(_holds(folder, suffix) for suffix in JSONL):
            return "jsonl"
        if any(_holds(folder, suffix) for suffix in TEXT):
            return "text"
    for kind, endings in {"jsonl": (*JSONL, ".json"), "text": TEXT, "hf": (".parquet", ".arrow")}.items():
        if path.endswith(endings):
            return kind
    raise BadData(f"{text}: of which kind? Expected KIND:PATH with one of {', '.join(KINDS[:-1])}, or synthetic")


def _holds(folder: Path, suffix: str) -> bool:
    return next(folder.rglob(f"*{suffix}"), None) is not None


def find_files(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a path in a fixed order: a file of any name, a glob, or a folder's files with these suffixes."""
    root = Path(path).expanduser()
    if root.is_dir():
        found = sorted(file for file in root.rglob("*") if file.name.endswith(suffixes) and file.is_file())
        expected = f"files that end in {', '.join(suffixes)}"
    elif root.exists():
        return [root]
    else:
        found = [Path(name) for name in sorted(glob.glob(str(root), recursive=True)) if Path(name).is_file()]
        expected = "a file, a folder, or a glob that finds files"
    if not found:
        raise BadData(f"{path}: nothing to read here; expected {expected}")
    return found
