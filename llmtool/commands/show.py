"""Results on stdout: one JSON object, or tables for people. rich is imported when a table is drawn."""

import json
import re
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from itertools import zip_longest
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypeVar

from llmtool.commands.options import KINDS
from llmtool.progress import human_bytes, human_count, human_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from llmtool.convert.converting import Report
    from llmtool.evaluate.evaluator import Report as Evaluation
    from llmtool.train.data.preview import Segment

DIFFERENCES_SHOWN = 10
PIPE_WIDTH = 1000  # columns where stdout is no terminal: a row is a line there, whatever its length
TEXT_WIDTH = 100  # of running text, where there is room for it
_Rest = TypeVar("_Rest", bound=Hashable)
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")


def print_json(value: dict[str, Any]) -> None:
    """One JSON object, strict: no NaN."""
    print(json.dumps(value, indent=2, allow_nan=False))


def printable(text: str) -> str:
    """``text`` without what a terminal would obey: names in a checkpoint are not ours."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def print_report(report: "Report") -> None:
    """What a conversion did, or would do."""
    console, table = _console(), _table(show_header=False)
    moved = report.bytes_read + report.bytes_written
    written = f"{report.tensors} arrays, {human_bytes(report.bytes_written)}"
    if not report.dry_run:
        written += f" in {human_seconds(report.seconds)} ({human_bytes(moved / report.seconds)}/s read and written)"
    for name, value in (
        ("from", f"{report.source}  ({report.from_word})"),
        ("to", f"{report.target}  ({report.to_word})"),
        ("model", _model_line(report.model.to_json(), report.parameters)),
        ("dtypes", _counts(report.dtypes)),
        ("written", written),
        ("side files", ", ".join(report.files) or "none"),
    ):
        table.add_row(name if name != "written" or not report.dry_run else "to write", printable(value))
    _print_table(console, table)
    if report.dry_run:
        console.print()
        for text, _, count in fold((line, None) for line in report.plan):
            console.print(printable(text) + (f"  ({count} steps)" if count > 1 else ""))
        console.print()
    _print_lines(console, "note: ", report.notes)
    if report.dry_run:
        console.print("dry run: nothing was written")


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
        ("besides", _counts(description["left_out"]) or "nothing"),
        ("not told", ", ".join(description["missing_facts"]) or "nothing that is needed"),
    ):
        table.add_row(name, printable(value))
    _print_table(console, table)
    _print_lines(console, "odd: ", description["odd"])
    _print_lines(console, "note: ", description["notes"])
    facts = _table("fact", "value")
    for name, value in description["config"].items():
        facts.add_row(name, printable(str(value)))
    listing = _table("array", "shape", "dtype")
    rows = [(each["name"], (" × ".join(map(str, each["shape"])) or "scalar", each["dtype"])) for each in tensors]
    for name, beside, count in ((*row, 1) for row in rows) if every else fold(rows):
        listing.add_row(printable(name) + (f"  ({count} arrays)" if count > 1 else ""), *beside)
    for block in (facts, listing):
        console.print()
        _print_table(console, block)


def print_diff(found: dict[str, Any]) -> None:
    """How two checkpoints differ; long lists are cut, JSON has them whole."""
    console = _console()
    _print_lines(console, "note: ", found["notes"])
    for title, rows in (
        (f"only in {found['a']}", found["missing"]),
        (f"only in {found['b']}", found["extra"]),
        ("differs", [_difference(row) for row in found["mismatched"]]),
    ):
        _print_lines(console, f"{title}: ", rows[:DIFFERENCES_SHOWN])
        if len(rows) > DIFFERENCES_SHOWN:
            console.print(printable(f"{title}: and {len(rows) - DIFFERENCES_SHOWN} more"))
    for (dtype_a, dtype_b), n in Counter((row["dtype_a"], row["dtype_b"]) for row in found["dtypes"]).items():
        weights = "1 weight is" if n == 1 else f"{n} weights are"
        console.print(printable(f"dtype: {weights} {dtype_a} in {found['a']} and {dtype_b} in {found['b']}"))
    gap = _finite(found["max_abs_diff"])
    within = f" (tolerance {found['tolerance']:g})" if found["tolerance"] else ""
    console.print(f"{'equal' if found['equal'] else 'different'}: {found['weights']} weights compared, "
                  f"largest difference {gap}{within}")


def print_evaluation(report: "Evaluation") -> None:
    """What an evaluation found."""
    console, table, m = _console(), _table(show_header=False), report.metrics
    rate = report.n_scored / report.seconds if report.seconds else 0.0
    told = [("accuracy", m.accuracy, m.accuracy_stderr, ".4f"),
            ("perplexity", m.perplexity, m.perplexity_stderr, ".4g")]
    for name, value in (
        ("task", f"{report.task}, {report.dataset} ({report.source})"),
        ("data hash", report.dataset_sha),
        ("protocol", f"{report.protocol}, contexts {'begin with' if m.bos else 'without'} BOS"),
        ("items", f"{m.n:,}, {m.truncated:,} truncated, {m.ties:,} ties"),
        *((name, _measured(value, error, form)) for name, value, error, form in told if value is not None),
        ("time", f"{human_seconds(report.seconds)} for {report.n_scored:,} items ({rate:.3g} items/s)"),
    ):
        table.add_row(name, printable(value))
    _print_table(console, table)
    _print_lines(console, "note: ", report.notes)


def print_verification(found: dict[str, Any]) -> None:
    """How the logits of two checkpoints differ."""
    console, table = _console(), _table("logits of", "against", "largest |Δ|", "largest KL", "same likeliest id")
    for name in ("a", "b"):
        console.print(printable(f"{name.upper()}: {found[name]}"))
    for row in found["comparisons"]:
        gap, kl = ("not finite" if row[key] is None else f"{row[key]:.2e}" for key in ("max_abs_diff", "kl"))
        table.add_row(row["a"], row["b"], gap, kl, f"{row['top1_agreement']:.2%}")
    _print_table(console, table)
    _print_lines(console, "note: ", found["notes"])
    console.print(f"{'the same' if found['equal'] else 'not the same'}: {found['positions']} positions, "
                  f"tolerance {found['tolerance']:g}")


def print_rows(segments: Iterable["Segment"]) -> None:
    """Rows of training data, what counts between « and »."""
    from rich.text import Text

    console = _console()
    for each in segments:
        console.print(f"row {each.row + 1}, segment {each.segment}: {each.tokens} tokens, {each.counted} counted",
                      style="bold")
        line = Text()
        for counts, text in each.runs:
            line.append(f"«{printable(text)}»" if counts else printable(text), style="green" if counts else "dim")
        console.print(line)


def print_layouts(layouts: list[dict[str, Any]]) -> None:
    """Every layout with its keys, as they are written; then the default and the meaning."""
    console = _console()
    width = min(TEXT_WIDTH, console.width)
    for layout in layouts:
        console.print(f"{layout['name']}: {layout['help']}", style="bold")
        for key, spec in layout["keys"].items():
            values = "|".join(value.upper() if value in KINDS else value for value in spec["values"])
            for text, indent in ((f"{key}={values}  [default: {spec['default']}]", "  "), (spec["help"], " " * 6)):
                console.print(fill(text, width, initial_indent=indent, subsequent_indent=" " * 6,
                                   break_long_words=False, break_on_hyphens=False))
        console.print()


def print_presets(listed: dict[str, Any]) -> None:
    """Every named run, then the models that have none."""
    console, table = _console(), _table("run", "parameters", "devices", "rows a step", "tokens a row", "steps", "what")
    for run in listed["runs"]:
        if run["name"].startswith("synthetic-"):
            continue
        rows = f"{run['batch_per_device'] * (run['devices'] or 1):g}" + ("" if run["devices"] else " a device")
        table.add_row(run["name"], human_count(run["parameters"]), str(run["devices"] or "any"), rows,
                      str(run["seq_len"]), f"{run['steps']:,}", run["summary"])
    _print_table(console, table)
    console.print("Each also as synthetic-NAME, on synthetic data; `llmtool presets show NAME` tells all sources.")
    console.print()
    named = {run["name"] for run in listed["runs"]}
    models = _table("model", "parameters", "facts from")
    for model in listed["models"]:
        if model["name"] not in named:
            models.add_row(model["name"], human_count(model["parameters"]), model["provenance"])
    console.print("Models for --model-config alone:")
    _print_table(console, models)


def print_preset(told: dict[str, Any]) -> None:
    """Every choice of one run beside its source."""
    console, table = _console(), _table("choice", "value", "source")
    run, sources = told["run"], told["provenance"]
    console.print(f"{told['name']}{' as Pax runs it' if told['strict_pax'] else ''}: {told['summary']}", style="bold")
    console.print(f"model: {_model_line(run['model'], told['parameters'])}; from {sources['model']}")
    for path, source in sources.items():
        if path != "model":
            group, _, name = path.rpartition(".")
            table.add_row(path, _choice((run[group] if group else run)[name]), source)
    _print_table(console, table)
    _print_lines(console, "note: ", told["notes"])


def print_training(told: dict[str, Any]) -> None:
    """What a training run came to."""
    console, table = _console(), _table(show_header=False)
    loss, best = told["loss"], told["best_validation_loss"]
    rate = "" if told["tokens_per_second"] is None else f", {told['tokens_per_second']:,.0f} tokens/s"
    why = {"steps": "", "data": ", the data have no more", "sigterm": ", stopped by SIGTERM; --resume goes on"}
    for name, value in (
        ("run", f"{told['name']}, {human_count(told['parameters'])} parameters, on {told['devices']} device(s)"),
        ("steps", f"{told['step']:,} of {told['steps']:,}{why[told['ended']]}"),
        ("time", human_seconds(told["seconds"]) + rate),
        ("memory", f"{human_bytes(told['max_memory_bytes'])} at most"),
        ("loss", "none this time" if loss is None else f"{loss:.4f}"),
        ("validation", "none" if best is None else f"{best:.4f} at best, at step {told['best_step']:,}"),
        ("checkpoints", f"{told['out']}  (--ckpt takes it)"),
    ):
        table.add_row(name, printable(value))
    _print_table(console, table)


def print_benchmark(told: dict[str, Any]) -> None:
    """How fast a run's steps are."""
    table = _table(show_header=False)
    mesh = ",".join(f"{axis}={size}" for axis, size in told["mesh"].items())
    mfu = "" if told["mfu"] is None else f", MFU {told['mfu']:.1%}"
    others = {name: told["tflops_per_device"] * told[f"{name}_flops_per_token"] / told["flops_per_token"]
              for name in ("colossalai", "megatron")}
    for name, value in (
        ("run", f"{told['name']}, {human_count(told['parameters'])} parameters, {told['precision']}"),
        ("devices", f"{told['devices']} × {told['device']}, {told['strategy']}, {mesh}"),
        ("step", f"{told['sequences_per_step']} sequences of {told['seq_len']} tokens"),
        ("timed", f"{told['steps']} steps after {told['skipped']}; the first took "
                  f"{human_seconds(told['first_step_seconds'])}"),
        ("seconds a step", f"{told['step_seconds']:.4g} (fastest {told['fastest_step_seconds']:.4g})"),
        ("sequences/s", f"{told['sequences_per_second']:,.4g}"),
        ("tokens/s", f"{told['tokens_per_second']:,.0f}"),
        ("TFLOP/s a device", f"{told['tflops_per_device']:.4g}{mfu}"),
        ("  by ColossalAI", f"{others['colossalai']:.4g}"),
        ("  by Megatron-LM", f"{others['megatron']:.4g}"),
        ("memory", f"{human_bytes(told['max_memory_bytes'])} at most"),
    ):
        table.add_row(name, value)
    _print_table(_console(), table)


def fold(rows: Iterable[tuple[str, _Rest]]) -> Iterator[tuple[str, _Rest, int]]:
    """Put texts that differ in numbers alone (layers, experts), and not in what stands beside them, into one.

    Yields text, what stands beside it, and how many rows it stands for: ``layers.{0..31}.w``.
    """
    groups: dict[tuple[str, _Rest], list[list[str]]] = {}
    for text, rest in rows:
        groups.setdefault((_NUMBER.sub("\0", text), rest), []).append(_NUMBER.findall(text))
    for (template, rest), numbers in groups.items():
        spans = [_span(sorted(set(map(int, column)))) for column in zip(*numbers, strict=True)]
        text = "".join(piece for pair in zip_longest(template.split("\0"), spans, fillvalue="") for piece in pair)
        yield text, rest, len(numbers)


def _span(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    if values == list(range(values[0], values[-1] + 1)):
        return f"{{{values[0]}..{values[-1]}}}"
    return "{" + ",".join(map(str, values)) + "}"


def _model_line(config: dict[str, Any], parameters: int | None) -> str:
    size = f"{human_count(parameters)} parameters ({parameters:,})" if parameters else "parameters unknown"
    facts = (config.get("family"), f"{config['n_layers']} layers" if "n_layers" in config else None,
             f"width {config['d_model']}" if "d_model" in config else None, size)
    return ", ".join(filter(None, facts))


def _choice(value: Any) -> str:
    """A choice as ``--set`` takes it."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value)) or "-"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _measured(value: float, error: float | None, form: str) -> str:
    return format(value, form) + (f" ± {error:{form}}" if error is not None else "")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({n})" for name, n in counts.items())


def _difference(row: dict[str, Any]) -> str:
    if "shape_a" in row:
        return f"{row['weight']}: shape {row['shape_a']} against {row['shape_b']}"
    return (f"{row['weight']}: {row['values_differing']:,} of {row['values']:,} values, "
            f"by up to {_finite(row['max_abs_diff'])}")


def _finite(gap: float | None) -> str:
    return "not finite" if gap is None else f"{gap:g}"


def _print_lines(console: "Console", prefix: str, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(printable(prefix + line))


def _print_table(console: "Console", table: "Table") -> None:
    with console.capture() as drawn:
        console.print(table)
    for line in drawn.get().splitlines():  # drawn as a block: without the blanks that fill its last column
        print(line.rstrip())


def _console() -> "Console":
    from rich.console import Console

    return Console(markup=False, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _table(*columns: str, show_header: bool = True) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if show_header else None, show_header=show_header, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")  # a name is never cut
    if not show_header:
        table.add_column(style="bold")
        table.add_column(overflow="fold")
    return table
