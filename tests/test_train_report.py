"""The page of a run: its figures, its plots, and that it needs and trusts nothing else."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from llmtool import cli
from llmtool.errors import BadCheckpoint
from llmtool.train.overrides import override, to_json
from llmtool.train.plot import MOST_POINTS, Line, plot, short
from llmtool.train.presets import run_config
from llmtool.train.report import write_report


def write_run(folder: Path, lines: list[dict[str, Any]], **changes: Any) -> Path:
    """A run's folder without a run."""
    folder.mkdir(exist_ok=True)
    run = dataclasses.replace(override(run_config("glam-tiny"), ["steps=40"]), **changes)
    (folder / "run.json").write_text(json.dumps(to_json(run)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def train(step: int, **values: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 5.0 - step / 10, "lr": 1e-4 * step, "grad_norm": 1.0, "skipped": 0.0,
            "aux_loss": 0.02, "seconds": 0.5, "tokens_per_second": 1000.0 + step, **values}


HISTORY = [train(1), train(10), {"kind": "validation", "step": 10, "loss": 4.5}, train(20, loss="nan", skipped=1.0),
           {"kind": "validation", "step": 20, "loss": 4.1}, {"kind": "validation", "step": 30, "loss": 4.3},
           {"kind": "evaluation", "step": 20, "lambada_accuracy": 0.25, "lambada_perplexity": 80.0},
           train(30, skipped=1.0)]


def svgs(page: str) -> list[ElementTree.Element]:
    """Every figure, parsed: a page with a broken one does not pass."""
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page)]


def test_figures_of_the_run(tmp_path: Path) -> None:
    told = write_report(write_run(tmp_path / "run", HISTORY))
    assert told["schema"] == "llmtool.report/1"
    assert (told["step"], told["steps"], told["loss"]) == (30, 40, 2.0)
    assert (told["best_validation_loss"], told["best_step"]) == (4.1, 20)
    assert told["tokens_per_second"] == 1020.0
    page = Path(told["page"]).read_text()
    for text in ("glam-tiny", "Load balance of experts", "Lambada accuracy", "Lambada perplexity", "Gradient norm",
                 "gradients not finite", "expert_groups", "none is complete"):
        assert text in page, text
    assert len(svgs(page)) == 7


def test_the_page_asks_nothing_of_a_network_and_runs_no_script(tmp_path: Path) -> None:
    page = Path(write_report(write_run(tmp_path / "run", HISTORY))["page"]).read_text()
    assert not re.search(r"https?:|//[a-z]|<script|<link|<img|@import|url\(|src=", page)


def test_names_are_text_not_markup(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    lines = [*HISTORY, {"kind": "evaluation", "step": 30, f"x{hostile}": 1.0}]
    page = Path(write_report(write_run(tmp_path / "run", lines, name=hostile, notes=(hostile,)))["page"]).read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 3


def test_a_loss_that_is_no_number_is_marked_and_told_as_null(tmp_path: Path) -> None:
    told = write_report(write_run(tmp_path / "run", [train(1), train(2, loss="nan")]))
    assert told["loss"] is None
    page = Path(told["page"]).read_text()
    assert "not finite at step 2" in page
    assert ">nan<" in page


def test_nothing_finite_at_all(tmp_path: Path) -> None:
    told = write_report(write_run(tmp_path / "run", [train(1, loss="nan", grad_norm="inf")]))
    assert "nothing finite was measured" in Path(told["page"]).read_text()
    assert told["tokens_per_second"] is None


def test_a_cut_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", HISTORY)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert write_report(folder)["step"] == 30


def test_long_runs_are_thinned_and_keep_their_extremes() -> None:
    points = [(float(step), 1.0 if step != 5000 else 9.0) for step in range(20_000)]
    figure = ElementTree.fromstring(plot([Line("x", points)]))
    line, span = (next(each for each in figure if each.get("class") == f"{kind} s0") for kind in ("line", "span"))
    assert len(line.get("points").split()) <= MOST_POINTS
    heights = [float(pair.split(",")[1]) for pair in span.get("points").split()]
    others = [float(pair.split(",")[1]) for pair in line.get("points").split()]
    assert min(heights) < min(others) - 50  # the one high value is still seen
    assert len(plot([Line("x", points)])) < 30_000


@pytest.mark.parametrize("values", [[3.0], [3.0, 3.0], [0.0, 0.0], [-1.0, 1.0], [1e-9, 1e9], [1e-300, 2e-300], [1e30]])
def test_any_values_make_a_figure_within_its_frame(values: list[float]) -> None:
    figure = ElementTree.fromstring(plot([Line("x", list(enumerate(values)), marked=True)]))
    _, _, width, height = map(float, figure.get("viewBox").split())
    for dot in (each for each in figure if each.tag == "circle"):
        assert 0 <= float(dot.get("cx")) <= width and 0 <= float(dot.get("cy")) <= height
    assert sum(each.tag == "circle" for each in figure) == len(values)
    assert 2 <= sum(each.get("class") == "grid" for each in figure) <= 12


@pytest.mark.parametrize(("value", "text"), [
    (0.0, "0"), (6e-4, "6e-4"), (1.25e-5, "1.25e-5"), (0.25, "0.25"), (1500.0, "1500"), (25_000.0, "25k"),
    (1.28e6, "1.28M"), (-3e9, "-3G")])
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no run\.json"):
        write_report(tmp_path)
    with pytest.raises(BadCheckpoint, match="no step"):
        write_report(write_run(tmp_path / "run", []))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", HISTORY)
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "a.html")]) == 0
    assert "step 30 of 40, loss 2.0000" in capsys.readouterr().out
    assert not (folder / "report.html").exists()
    assert cli.main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == str(folder / "report.html")
    assert cli.main(["report", str(tmp_path / "absent")]) == 2
