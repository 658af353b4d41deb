"""Choices of a run changed by name, on a command line and in a file; a run as JSON; and what cannot be."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmtool.errors import BadRun, LlmtoolError
from llmtool.model_config import RopeScaling
from llmtool.train import overrides
from llmtool.train.checking import check_run
from llmtool.train.overrides import override, override_from_file, value_at
from llmtool.train.presets import RUNS, run_config

RUN = run_config("gpt-126m")


@pytest.mark.parametrize(("text", "path", "value"), [
    ("optimizer.learning_rate=1e-4", "optimizer.learning_rate", 1e-4), (" steps = 1_000 ", "steps", 1000),
    ("optimizer.clip_norm=none", "optimizer.clip_norm", None),
    ("optimizer.update_rms_cap=1", "optimizer.update_rms_cap", 1.0),
    ("mesh.ici=1,4,2", "mesh.ici", (1, 4, 2)), ("mesh.ici=[1, 4, 2]", "mesh.ici", (1, 4, 2)),
    ("mesh.ici=none", "mesh.ici", None), ("strategy=zero2", "strategy", "zero2"),
    ("batch_per_device=0.5", "batch_per_device", 0.5),
    ("data.sources=0.7*jsonl:a b.jsonl,text:b=c.txt", "data.sources", ("0.7*jsonl:a b.jsonl", "text:b=c.txt")),
    ("data.validation=", "data.validation", ()), ("data.tokenizer=None", "data.tokenizer", None),
    ("name=mine", "name", "mine"),
    ("model.tied=false", "model.tied", False), ("model.eos_id=1,2", "model.eos_id", (1, 2)),
    ("model.eos_id=7", "model.eos_id", 7),
    ("optimizer.cap_qkv_together=TRUE", "optimizer.cap_qkv_together", True)])
def test_set(text: str, path: str, value: object) -> None:
    found = override(RUN, [text])
    assert value_at(found, path) == value and type(value_at(found, path)) is type(value)
    changed = [p for p in overrides.paths() if value_at(found, p) != value_at(RUN, p)]
    assert set(changed) <= {path}


@pytest.mark.parametrize(("text", "words"), [
    ("optimizer.learningrate=1", "is called optimizer.learningrate; did you mean optimizer.learning_rate"),
    ("learning_rate=1", "did you mean optimizer.learning_rate"), ("zzz=1", "there are attention, "),
    ("optimizer.lr.x=1", "no choice of a run is called optimizer.lr.x"),
    ("optimizer=adam", "optimizer is a group of choices; set one of them, such as optimizer.kind"),
    ("steps", "expected path=value"), ("steps=1.5", "--set steps is '1.5'; expected a whole number"),
    ("steps=true", "expected a whole number"), ("steps=none", "expected a whole number"),
    ("steps=", "expected a whole number"), ("optimizer.eps=nan", "expected a number"),
    ("optimizer.eps=small", "'small'; expected a number"), ("optimizer.clip_norm=x", "expected a number or none"),
    ("precision=bf17", "'bf17'; expected bf16 or fp32 or fp16"), ("mesh.ici=1,8", "expected 3 × a whole number"),
    ("mesh.dcn=1,x,1", "'x'; expected a whole number"), ("model.tied=1", "'1'; expected true or false"),
    ("model.n_kv_heads=5", "not a multiple of n_kv_heads 5"), ("model.rope_scaling=3", "expected a table of factor")])
def test_set_refuses(text: str, words: str) -> None:
    with pytest.raises(LlmtoolError) as caught:
        override(RUN, [text])
    assert words in str(caught.value)


def test_values_that_must_fit_change_together_and_the_later_wins() -> None:
    found = override(RUN, ["model.n_heads=6", "model.n_kv_heads=3", "steps=1", "steps=2"])
    assert (found.model.n_heads, found.model.n_kv_heads, found.steps) == (6, 3, 2)


TOML = """
steps = 7
batch_per_device = 2
[optimizer]
learning_rate = 1e-5
clip_norm = "none"
[data]
sources = ["text:a.txt", "0.5*text:b.txt"]
[mesh]
ici = [1, 2, 1]
[model]
n_layers = 2
[model.rope_scaling]
factor = 8
low_freq_factor = 1.0
high_freq_factor = 4.0
original_context = 8192
"""


def test_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    found = override_from_file(RUN, file)
    assert (found.steps, found.batch_per_device, found.mesh.ici) == (7, 2.0, (1, 2, 1))
    assert (found.optimizer.learning_rate, found.optimizer.clip_norm, found.optimizer.b2) == (1e-5, None, 0.95)
    assert found.data.sources == ("text:a.txt", "0.5*text:b.txt")
    assert found.model == replace(RUN.model, n_layers=2, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize(("text", "words"), [
    ("steps = '7'", "run.toml: steps is '7'; expected a whole number"), ("steps = true", "True; expected a whole"),
    ("steps = 7.0", "7.0; expected a whole number"), ("step = 7", "no choice of a run is called step; did you mean"),
    ("optimizer = 3", "run.toml: optimizer is 3; expected a table of choices"), ("steps = ", "run.toml: not TOML"),
    ("[optimizer]\nkind = 'sgd'", "optimizer.kind is 'sgd'; expected pax or adamw"),
    ("[optimizer.kind]\nx = 1", "optimizer.kind is {'x': 1}"), ("seed = inf", "expected a whole number"),
    ("init_std = inf", "expected a number"), ("[mesh]\nici = [1, 2]", "expected 3 × a whole number or none"),
    ("[model.rope_scaling]\nfactor = 8", "model.rope_scaling has factor; expected factor, low_freq_factor"),
    ("[zoo.animal]\nx = 1", "no choice of a run is called zoo")])
def test_toml_refuses(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(LlmtoolError) as caught:
        override_from_file(RUN, file)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [*RUNS])
def test_json_round_trip(name: str) -> None:
    run = run_config(name)
    text = json.dumps(overrides.to_json(run), allow_nan=False)
    assert overrides.from_json(json.loads(text), "run.json") == run


def test_json_is_checked() -> None:
    data = json.loads(json.dumps(overrides.to_json(RUN)))
    assert data["schema"] == "llmtool.run/1"
    older = {key: value for key, value in data.items() if key != "dropout"}
    assert overrides.from_json(older, "run.json") == RUN
    for change, words in (
        ({"schema": "llmtool.run/9"}, "schema is 'llmtool.run/9'"), ({"model": 3}, "not a run"),
        ({"name": None}, "not a run"), ({"stepz": 1}, "did you mean steps"), ({"seed": "0"}, "run.json: seed is '0'"),
        ({"model": {**data["model"], "tied": 1}}, "run.json: model.tied is 1; expected true or false"),
        ({"model": {**data["model"], "colour": 1}}, "no choice of a run is called model.colour"),
        ({"optimizer": {"b1": None}}, "optimizer.b1 is None")):
        with pytest.raises(LlmtoolError) as caught:
            overrides.from_json({**data, **change}, "run.json")
        assert words in str(caught.value)


@pytest.mark.parametrize(("text", "words"), [
    ("steps=0", "steps is 0; expected at least 1"),
    ("batch_per_device=0", "batch_per_device is 0.0; expected more than 0"),
    ("optimizer.b2=1", "optimizer.b2 is 1.0; expected 0 to 1, less than 1"),
    ("schedule.min_ratio=2", "expected 0 to 1"),
    ("schedule.decay_start=5", "warmup_steps 636, decay_start 5, decay_end 500000; expected in this order"),
    ("mesh.ici=1,0,1", "mesh: ici (1, 0, 1)"), ("seq_len=4096", "the model has learned 2048 positions"),
    ("capacity_factor=2", "this model has none"), ("checkpoint.every_steps=0", "more than 0, or none")])
def test_impossible_choices(text: str, words: str) -> None:
    with pytest.raises(BadRun) as caught:
        check_run(override(RUN, [text]))
    assert words in str(caught.value)


def test_all_impossible_choices_are_told_at_once() -> None:
    with pytest.raises(BadRun) as caught:
        check_run(override(RUN, ["steps=0", "dropout=1", "grad_accum=-3"]))
    assert len(caught.value.problems) == 3  # type: ignore[attr-defined]
