"""A run's folder as one HTML page: what it is, how it went, every choice. Nothing is fetched from anywhere."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from llmtool.convert.openers.native import saved_steps
from llmtool.errors import BadCheckpoint
from llmtool.presets import parameter_count
from llmtool.progress import human_count, human_seconds
from llmtool.train.config import RunConfig
from llmtool.train.flops import training_flops
from llmtool.train.metrics_log import NAME, read_metrics
from llmtool.train.overrides import paths, value_at
from llmtool.train.plot import Line, plot, short
from llmtool.train.saved_run import RUN_FILE, saved_run

PAGE = "report.html"


@dataclass(frozen=True)
class History:
    """A run's choices, and the lines of its log by kind: "train", "validation", "evaluation"."""

    folder: Path
    run: RunConfig
    lines: Mapping[str, list[dict[str, Any]]]

    @classmethod
    def of(cls, folder: str | Path) -> "History":
        """Read a run's folder; raises BadCheckpoint where it is none, or has no log yet."""
        folder = Path(folder)
        run = saved_run(folder)
        if run is None:
            raise BadCheckpoint(f"{folder}: no {RUN_FILE}; expected a run's folder, made by `llmtool pretrain --out`")
        lines: dict[str, list[dict[str, Any]]] = {}
        for line in read_metrics(folder):
            lines.setdefault(line["kind"], []).append(line)
        if not lines.get("train"):
            raise BadCheckpoint(f"{folder}: no step is in {NAME} yet; come back when the run has logged one")
        return cls(folder, run, lines)

    def series(self, kind: str, key: str) -> list[tuple[float, float]]:
        """(step, value); a word for what is no number in JSON becomes NaN."""
        return [(line["step"], value if isinstance(value, int | float) else math.nan)
                for line in self.lines.get(kind, []) if (value := line.get(key)) is not None]

    def summary(self) -> dict[str, Any]:
        """The figures of "llmtool.report/1", but for its schema and page."""
        last = self.lines["train"][-1]
        scored = [(loss, step) for step, loss in self.series("validation", "loss") if math.isfinite(loss)]
        best = min(scored, default=(None, None))
        rates = [value for _, value in self.series("train", "tokens_per_second")[1:]]  # the first one compiles
        loss = last["loss"]
        return {
            "run": str(self.folder),
            "name": self.run.name,
            "parameters": parameter_count(self.run.model),
            "step": last["step"],
            "steps": self.run.steps,
            "loss": loss if isinstance(loss, int | float) else None,
            "best_validation_loss": best[0],
            "best_step": best[1],
            "tokens_per_second": statistics.median(rates) if rates else None,
        }


def write_report(folder: str | Path, page: str | Path | None = None) -> dict[str, Any]:
    """Write the page of the run in ``folder`` (default: RUN/report.html); its figures, schema "llmtool.report/1"."""
    history = History.of(folder)
    page = Path(folder) / PAGE if page is None else Path(page)
    page.write_text(render(history), encoding="utf-8")
    return {"schema": "llmtool.report/1", "page": str(page), **history.summary()}


def render(history: History) -> str:
    """The page."""
    run, summary = history.run, history.summary()
    parts = [
        f"<header><h1>{escape(run.name)}</h1><p>{escape(_sentence(history, summary))}</p></header>",
        f'<section class="tiles">{"".join(_tiles(history, summary))}</section>',
        f'<section class="plots">{"".join(_figures(history))}</section>',
    ]
    if run.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
        parts.append(f"<section><h2>How the preset was decided</h2><ul>{notes}</ul></section>")
    parts.append(f"<section><h2>Choices</h2>{_choices(run)}</section>")
    title = f"{escape(run.name)} – llmtool"
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{_STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n")


def _sentence(history: History, summary: Mapping[str, Any]) -> str:
    m = history.run.model
    return (f"{m.family}, {human_count(summary['parameters'])} parameters: {m.n_layers} layers, width {m.d_model}, "
            f"{m.n_heads} heads, {m.vocab_size} pieces; rows of {history.run.seq_len} tokens; {history.run.precision}, "
            f"strategy {history.run.strategy}. From {history.folder.resolve().name}/.")


def _tiles(history: History, summary: Mapping[str, Any]) -> list[str]:
    train = history.lines["train"]
    spent = sum(b["seconds"] * (b["step"] - a["step"]) for a, b in zip([{"step": 0}, *train], train, strict=False))
    rate, best = summary["tokens_per_second"], summary["best_validation_loss"]
    flops = training_flops(history.run).model
    skipped, kept = int(train[-1].get("skipped", 0)), sorted(saved_steps(history.folder))
    tiles = [
        ("step", f"{summary['step']:,}", f"of {summary['steps']:,}"),
        ("training loss", _number(train[-1]["loss"]), "nats a token"),
        ("best validation", _number(best), "" if best is None else f"at step {summary['best_step']:,}"),
        ("tokens a second", "–" if rate is None else short(rate),
         "" if rate is None else f"{rate * flops / 1e12:,.4g} model TFLOP/s in all"),
        ("time in steps", human_seconds(spent), "from line to line of the log"),
        ("skipped steps", str(skipped), "gradients not finite" if skipped else "all gradients were finite"),
        ("checkpoints", str(len(kept)), f"newest: step {kept[-1]:,}" if kept else "none is complete"),
    ]
    return [f'<div class="tile"><h3>{escape(name)}</h3><b>{escape(value)}</b><small>{escape(more)}</small></div>'
            for name, value, more in tiles]


def _figures(history: History) -> list[str]:
    def line(name: str, kind: str, key: str, marked: bool = False) -> list[Line]:
        points = history.series(kind, key)
        return [Line(name, points, marked)] if points else []

    figures = [
        ("Loss", "nats a token", [*line("training", "train", "loss"), *line("validation", "validation", "loss", True)],
         False),
        ("Learning rate", "", line("learning rate", "train", "lr"), True),
        ("Gradient norm", "before clipping", line("gradient norm", "train", "grad_norm"), False),
        ("Throughput", "tokens a second", line("tokens a second", "train", "tokens_per_second"), True),
    ]
    if any(line.get("aux_loss") for line in history.lines["train"]):
        figures.append(("Load balance of experts", "weighted", line("load balance", "train", "aux_loss"), False))
    scores = {key for each in history.lines.get("evaluation", []) for key, value in each.items()
              if key not in ("kind", "step") and isinstance(value, int | float)}
    figures += [(key.replace("_", " ").capitalize(), "evaluated in the loop",
                 line(key, "evaluation", key, True), False) for key in sorted(scores)]
    return [_figure(*figure) for figure in figures if figure[2]]


def _figure(title: str, unit: str, lines: list[Line], from_zero: bool) -> str:
    legend = "".join(f'<span class="key s{number}">{escape(line.name)}</span>' for number, line in enumerate(lines)
                     if len(lines) > 1)
    return (f"<figure><figcaption><h2>{escape(title)}</h2><small>{escape(unit)}</small>{legend}</figcaption>"
            f"{plot(lines, unit=unit, from_zero=from_zero)}<small class=\"steps\">step</small></figure>")


def _choices(run: RunConfig) -> str:
    """Every choice, folded by its group."""
    groups: dict[str, list[str]] = {"run": []}
    for path in paths():
        if path in ("name", "notes"):
            continue
        group, _, name = path.rpartition(".")
        value = value_at(run, path)
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        row = f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"
        groups.setdefault(group or "run", []).append(row)
    return "".join(f"<details{' open' if group == 'run' else ''}><summary>{escape(group)}</summary>"
                   f"<table>{''.join(rows)}</table></details>" for group, rows in groups.items())


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.4f}" if isinstance(value, int | float) else str(value)


_STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--soft:#667085;--rule:#e4e7ec;--paper:#fff;--card:#f8f9fb;
--s0:#2563c9;--s1:#d2691e;--s2:#2e8b57;--bad:#c0392b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#98a2b3;--rule:#333b49;--paper:#14181f;--card:#1b212b;
--s0:#6ea3f5;--s1:#f0a060;--s2:#6fcf97;--bad:#ff7b6b}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 24px 64px}h1{margin:0;font-size:30px}header p{margin:4px 0 24px;
color:var(--soft)}h2{font-size:16px;margin:0}section{margin-bottom:28px}section>h2{margin-bottom:8px;font-size:19px}
small{color:var(--soft)}.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:12px}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px}
.tile h3{margin:0;font-size:13px;font-weight:500;color:var(--soft)}.tile b{display:block;font-size:20px;
white-space:nowrap;font-weight:600;font-variant-numeric:tabular-nums}.tile small{font-size:12px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:16px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px 14px 6px}
figcaption{display:flex;gap:10px;align-items:baseline;flex-wrap:wrap}.key{font-size:13px;margin-left:auto}
.key+.key{margin-left:0}.key::before{content:"";display:inline-block;width:14px;height:3px;margin-right:6px;
vertical-align:middle;background:currentColor}.key.s0{color:var(--s0)}.key.s1{color:var(--s1)}.key.s2{color:var(--s2)}
.plot{display:block;width:100%;height:auto;margin-top:6px}.plot text{fill:var(--soft);font-size:12px}
.plot .y{text-anchor:end}.plot .x{text-anchor:middle}.plot .grid{stroke:var(--rule);stroke-width:1}
.plot .line{fill:none;stroke-width:1.8;stroke-linejoin:round}.plot .span{opacity:.22;stroke:none}
.plot .lost{fill:var(--bad);text-anchor:middle;font-size:14px;font-weight:700}
.line.s0{stroke:var(--s0)}.line.s1{stroke:var(--s1)}.line.s2{stroke:var(--s2)}
.dot.s0,.span.s0{fill:var(--s0)}.dot.s1,.span.s1{fill:var(--s1)}.dot.s2,.span.s2{fill:var(--s2)}
.steps{display:block;text-align:center;font-size:12px;margin-top:-4px}
details{border-top:1px solid var(--rule);padding:6px 0}summary{cursor:pointer;font-weight:600}
table{border-collapse:collapse;margin:6px 0 6px 16px;font-size:14px}th{text-align:left;font-weight:400;
color:var(--soft);padding:1px 24px 1px 0;vertical-align:top}td{font-variant-numeric:tabular-nums;
overflow-wrap:anywhere}ul{margin:0;padding-left:20px}
"""
