"""Results on stdout: one JSON object, or tables for people. rich is imported when a table is drawn."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from llmtool.progress import human_bytes, human_count, human_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from llmtool.convert import Report

PIPE_WIDTH = 160  # columns where stdout is no terminal
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")


def print_json(value: dict[str, Any]) -> None:
    """One JSON object, strict: no NaN."""
    print(json.dumps(value, indent=2, allow_nan=False))


def printable(text: str) -> str:
    """``text`` without what a terminal would obey: names in a checkpoint are not ours."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def print_report(report: "Report", *, dry_run: bool) -> None:
    """What a conversion did, or would do."""
    console = _console()
    if dry_run:
        for line in report.plan:
            console.print(printable(line))
        console.print(f"dry run: nothing was written to {printable(report.target)}")
        return
    table = _table(show_header=False)
    rate = (report.bytes_read + report.bytes_written) / report.seconds if report.seconds else 0
    for name, value in (
        ("from", f"{report.source}  ({report.from_word})"),
        ("to", f"{report.target}  ({report.to_word})"),
        ("model", _model_line(report.model.to_json(), report.parameters)),
        ("dtypes", _counts(report.dtypes)),
        ("written", f"{report.tensors} arrays, {human_bytes(report.bytes_written)} in {human_seconds(report.seconds)}"
                    f" ({human_bytes(rate)}/s read and written)"),
    ):
        table.add_row(name, printable(value))
    console.print(table)
    _print_lines(console, "", (_cast_line(cast) for cast in report.casts))
    _print_lines(console, "note: ", report.notes)


def print_description(description: dict[str, Any], *, every: bool) -> None:
    """What a checkpoint is."""
    console, tensors = _console(), description["tensors"]
    version = [f"version {description['version']}"] if description["version"] else []
    step = [f"step {description['step']}"] if description["step"] is not None else []
    manifest = ["with a manifest of llmtool"] if description["manifest"] else []
    table = _table(show_header=False)
    for name, value in (
        ("checkpoint", description["path"]),
        ("layout", ", ".join([description["word"], *version, *step, *manifest])),
        ("model", _model_line(description["config"], description["parameters"])),
        ("dtypes", _counts(description["dtypes"])),
        ("size", f"{human_bytes(description['bytes'])} in {len(tensors)} arrays"),
        ("left out", _counts(description["left_out"]) or "nothing"),
        ("not told", ", ".join(description["missing_facts"]) or "nothing that is needed"),
    ):
        table.add_row(name, printable(value))
    console.print(table)
    _print_lines(console, "odd: ", description["odd"])
    facts = _table("fact", "value")
    for name, value in description["config"].items():
        facts.add_row(name, printable(str(value)))
    listing = _table("array", "shape", "dtype")
    for name, shape, dtype in _every(tensors) if every else folded(tensors):
        listing.add_row(printable(name), " × ".join(map(str, shape)) or "scalar", dtype)
    for block in (facts, listing):
        console.print()
        console.print(block)


def print_diff(found: dict[str, Any]) -> None:
    """How two checkpoints differ; long lists are cut, JSON has them whole."""
    console = _console()
    for title in ("missing", "extra", "mismatched"):
        rows = found[title]
        _print_lines(console, f"{title}: ", (row if isinstance(row, str) else _pairs(row) for row in rows[:10]))
        if len(rows) > 10:
            console.print(f"{title}: and {len(rows) - 10} more")
    verdict = "equal" if found["equal"] else "different"
    console.print(f"{verdict}: largest difference {found['max_abs_diff']:g}" if found["max_abs_diff"] is not None
                  else verdict)


def print_layouts(layouts: list[dict[str, Any]]) -> None:
    """Every layout with its keys; a key's default stands first."""
    table = _table("layout", "key", "values", "default", "meaning")
    for layout in layouts:
        access = "read and write" if layout["write"] else "read"
        table.add_row(layout["name"], "", access, "", layout["help"], style="bold")
        for key, spec in layout["keys"].items():
            table.add_row("", key, " | ".join(spec["values"]), spec["default"], spec["help"])
        table.add_section()
    _console().print(table)


def folded(tensors: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[int], str]]:
    """Name, shape and dtype of every array; those that differ in layer numbers alone share one line."""
    groups: dict[tuple[str, tuple[int, ...], str], list[list[str]]] = {}
    for tensor in tensors:
        key = (_NUMBER.sub("\0", tensor["name"]), tuple(tensor["shape"]), tensor["dtype"])
        groups.setdefault(key, []).append(_NUMBER.findall(tensor["name"]))
    for (template, shape, dtype), numbers in groups.items():
        spans = [_span(sorted(set(map(int, column)))) for column in zip(*numbers, strict=True)]
        name = "".join(piece for pair in zip_longest(template.split("\0"), spans, fillvalue="") for piece in pair)
        yield name + (f"  ({len(numbers)} arrays)" if len(numbers) > 1 else ""), list(shape), dtype


def _span(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    if values == list(range(values[0], values[-1] + 1)):
        return f"{{{values[0]}..{values[-1]}}}"
    return "{" + ",".join(map(str, values)) + "}"


def _every(tensors: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[int], str]]:
    return ((tensor["name"], tensor["shape"], tensor["dtype"]) for tensor in tensors)


def _model_line(config: dict[str, Any], parameters: int | None) -> str:
    size = f"{human_count(parameters)} parameters ({parameters:,})" if parameters else "parameters unknown"
    facts = (config.get("family"), f"{config['n_layers']} layers" if "n_layers" in config else None,
             f"width {config['d_model']}" if "d_model" in config else None, size)
    return ", ".join(filter(None, facts))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({n})" for name, n in counts.items())


def _cast_line(cast: dict[str, Any]) -> str:
    return "cast: " + _pairs(cast)


def _pairs(row: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.items())


def _print_lines(console: "Console", prefix: str, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(printable(prefix + line))


def _console() -> "Console":
    from rich.console import Console

    return Console(markup=False, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _table(*columns: str, show_header: bool = True) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(*columns, box=box.SIMPLE_HEAD if show_header else None, show_header=show_header, show_edge=False)
    if not show_header:
        table.add_column(style="bold")
        table.add_column(overflow="fold")
    return table
