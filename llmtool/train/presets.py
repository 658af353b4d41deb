"""Training runs by name. ``RUNS["gpt-5b"]()`` is a RunConfig; ``provenance`` says where each number comes from."""

import difflib
from collections.abc import Iterator, Mapping

from llmtool.errors import UnknownPreset
from llmtool.presets import MODELS
from llmtool.train import runs_llama, runs_pax, runs_tiny
from llmtool.train.config import RunConfig
from llmtool.train.recipe import Layer, Recipe

SYNTHETIC = "synthetic-"
_SPEED = Layer("a run on synthetic data measures speed: nothing is saved or evaluated", {
    "data.sources": ("synthetic",), "checkpoint.every_steps": None, "evaluation.every_steps": None})
_PAX_STEPS = Layer("paxml scripts_gpu/configs.py, Synthetic126M, Synthetic5B, Synthetic175B: MAX_STEPS", {"steps": 100})
_IDS = "data.sources: Pax fills batches with one constant token, which routes all alike; here ids are random"


def _all() -> Iterator[Recipe]:
    real = (*runs_pax.RUNS, *runs_llama.RUNS, *runs_tiny.RUNS)
    yield from real
    for recipe in real:
        steps = runs_llama.BENCHMARKS.get(recipe.name, _PAX_STEPS)
        notes = (_IDS,) if recipe in runs_pax.RUNS else ()
        yield recipe.over(SYNTHETIC + recipe.name, f"{recipe.name} on synthetic data, to measure speed", _SPEED, steps,
                          notes=notes)


RUNS: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _all()}


def recipe(name: str) -> Recipe:
    """The named run; raises UnknownPreset with the nearest names."""
    if name in MODELS and name not in RUNS:
        raise UnknownPreset(f"{name} is a model, for --model-config, and not a run; take a run and set its model.*")
    if name not in RUNS:
        close = difflib.get_close_matches(name.lower(), RUNS, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(RUNS)}"
        raise UnknownPreset(f"no run is called {name!r}; {hint}")
    return RUNS[name]


def run_config(name: str, *, strict_pax: bool = False) -> RunConfig:
    """The choices of a named run; ``strict_pax``: as Pax' code has them where its page says otherwise."""
    return recipe(name)(strict_pax)


def provenance(name: str, *, strict_pax: bool = False) -> dict[str, str]:
    """Path of each choice of a named run -> its source."""
    return recipe(name).provenance(strict_pax)
