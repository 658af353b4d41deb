"""Named runs: Pax' own settings, meshes and batches, and the provenance of every number."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmtool import cli
from llmtool.errors import BadRun, UnknownPreset
from llmtool.presets import MODELS, parameter_count
from llmtool.train import overrides, presets
from llmtool.train.checking import check_run
from llmtool.train.config import RunConfig
from llmtool.train.overrides import value_at
from llmtool.train.presets import RUNS, run_config
from llmtool.train.recipe import DEFAULT

GOLDEN = Path(__file__).parent / "fixtures" / "golden" / "praxis_optimizer" / "presets_lr.json"
SETTINGS = json.loads(GOLDEN.read_text())["settings"]
PAX = {"gpt-126m": "GPT126M", "gpt-5b": "GPT5B", "gpt-175b": "GPT175B", "glam-126m-64e": "GLaM126M64E",
       "glam-64b-64e": "GLaM64B64E"}
REAL = [*PAX, "llama1-7b", "llama1-13b", "llama1-30b", "llama1-65b", "llama2-7b", "llama2-13b", "llama2-70b",
        "llama3-8b", "llama3-70b"]
TINY = ["gpt-tiny", "llama-tiny", "glam-tiny", "mixtral-tiny", "neox-tiny"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", PAX)
def test_the_optimizer_is_what_praxis_instantiates(name: str, strict: bool) -> None:
    run, settings = run_config(name, strict_pax=strict), SETTINGS[PAX[name]]
    o, s = run.optimizer, run.schedule
    assert (o.kind, s.kind) == ("pax", "pax")
    found = (o.learning_rate, o.b1, o.b2, o.eps, o.eps_root, o.weight_decay, o.clip_norm)
    assert found == tuple(settings[key] for key in (
        "learning_rate", "beta1", "beta2", "epsilon", "epsilon_root", "weight_decay", "clip_gradient_norm_to_value"))
    assert o.update_rms_cap is None and settings["clip_threshold"] == -1
    assert (s.warmup_steps, s.decay_start, s.decay_end, s.min_ratio) == tuple(settings[key] for key in (
        "warmup_steps", "decay_start", "decay_end", "min_ratio"))
    assert run.steps == settings["num_train_steps"]


def test_there_is_a_run_of_every_name() -> None:
    names = [*REAL, *TINY]
    assert list(RUNS) == names + [f"synthetic-{name}" for name in names]
    for name, recipe in RUNS.items():
        run = recipe()
        assert run.name == name == recipe.name and recipe.summary
        assert check_run(run) is run
    for name in REAL:
        assert run_config(name).model == MODELS[name].config
    with pytest.raises(UnknownPreset, match="did you mean llama2-7b"):
        run_config("llama2_7b")
    with pytest.raises(UnknownPreset, match="gpt2 is a model,"):
        run_config("gpt2")
    with pytest.raises(UnknownPreset, match="there are gpt-126m, "):
        run_config("zzzz")


@pytest.mark.parametrize("name", RUNS)
def test_every_number_has_its_source(name: str) -> None:
    """Every choice is there, and one that differs from the default was told by somebody."""
    recipe = RUNS[name]
    plain = RunConfig(name, recipe.model)
    for strict in (False, True) if recipe.strict is not None else (False,):
        run, told = recipe(strict), presets.provenance(name, strict_pax=strict)
        listed = [path for path in overrides.paths() if not path.startswith("model.") and path not in ("name", "notes")]
        assert list(told) == ["model", *listed]
        assert all(len(text) > 10 for text in told.values())
        for path in listed:
            assert value_at(run, path) == value_at(plain, path) or told[path] != DEFAULT, path


@pytest.mark.parametrize(("name", "path", "page", "code"), [
    ("gpt-5b", "dropout", 0.0, 0.1), ("gpt-175b", "init_std", 0.006, 0.023),
    ("glam-126m-64e", "batch_per_device", 8.0, 4.0), ("glam-126m-64e", "mesh.ici", (1, 8, 1), (1, 64, 1)),
    ("glam-126m-64e", "mesh.dcn", (1, 8, 1), (1, 1, 1)), ("glam-64b-64e", "seq_len", 2048, 1024),
    ("glam-64b-64e", "optimizer.b1", 0.9, 0.9)])
def test_where_page_and_code_differ_both_can_be_had_and_a_note_says_so(
    name: str, path: str, page: object, code: object
) -> None:
    for found, expected in ((run_config(name), page), (run_config(name, strict_pax=True), code)):
        assert value_at(found, path) == expected
        assert any(note.startswith((path, path.partition(".")[0])) for note in found.notes)
    assert (presets.provenance(name)[path] != presets.provenance(name, strict_pax=True)[path]) == (page != code)


def test_strict_pax_is_of_pax_alone() -> None:
    with pytest.raises(BadRun, match="llama2-7b does not come from Pax"):
        run_config("llama2-7b", strict_pax=True)


@pytest.mark.parametrize(("name", "devices", "global_batch"), [
    ("gpt-126m", 64, 256), ("gpt-5b", 256, 2048), ("gpt-175b", 256, 1536), ("glam-126m-64e", 64, 512),
    ("glam-64b-64e", 512, 2048)])
def test_meshes_and_global_batches(name: str, devices: int, global_batch: float) -> None:
    """A mesh covers the devices of the published run; its rows times those give the published batch."""
    run = run_config(name)
    assert run.mesh.ici is not None
    sizes = [i * d for i, d in zip(run.mesh.ici, run.mesh.dcn, strict=True)]
    assert sizes[0] * sizes[1] * sizes[2] == devices
    assert run.batch_per_device * devices == global_batch


def test_facts_of_the_llama_runs() -> None:
    for name in REAL[5:]:
        run = run_config(name)
        assert run.optimizer == replace(run.optimizer, kind="adamw", b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1,
                                        clip_norm=1.0)
        assert run.optimizer.learning_rate == (3e-4 if name.endswith(("-7b", "-8b", "-13b")) else 1.5e-4)
        assert run.schedule.warmup_steps == (8000 if "llama3" in name else 2000)
        assert run.seq_len == {"1": 2048, "2": 4096, "3": 8192}[name[5]]
        assert (run.strategy, run.batch_per_device, run.data.sources) == ("fsdp", 2.0, ())


def test_synthetic_runs_measure_speed_alone() -> None:
    for name in REAL:
        run, real = run_config(f"synthetic-{name}"), run_config(name)
        assert run.data.sources == ("synthetic",)
        assert run.checkpoint.every_steps is run.evaluation.every_steps is None
        assert run.steps == (100 if name in PAX else 5)
        assert (run.model, run.optimizer, run.mesh) == (real.model, real.optimizer, real.mesh)
    strict = run_config("synthetic-gpt-5b", strict_pax=True)
    assert (strict.dropout, strict.steps) == (0.1, 100)


@pytest.mark.parametrize("name", TINY)
def test_tiny_twins_are_tiny_and_of_their_family(name: str) -> None:
    run = run_config(name)
    assert parameter_count(run.model) < 2e6
    assert run.precision == "fp32" and run.mesh.ici is None
    assert run.model.family == {"neox": "gpt_neox"}.get(name[:4], name.partition("-")[0])


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out.replace("\n ", "\n") for name in [*REAL, *TINY, "gpt2"])
    assert cli.main(["presets", "show", "gpt-5b", "--strict-pax"]) == 0
    out = capsys.readouterr().out
    assert "gpt-5b as Pax runs it" in out and "input_dropout_prob" in out and "note: dropout" in out
    for path in presets.provenance("gpt-5b"):
        assert f"\n {path} " in out or f"\n{path}: " in out, path
    assert cli.main(["presets", "show", "llama2-7b", "--strict-pax"]) == 2
    assert cli.main(["presets", "show", "gpt_5b"]) == 2
    assert "did you mean gpt-5b" in capsys.readouterr().err


def test_the_json_of_a_run_is_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "show", "glam-64b-64e", "--json", "--strict-pax"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert overrides.from_json(told["run"], "stdout") == run_config("glam-64b-64e", strict_pax=True)
    assert told["parameters"] == 1142891356160
