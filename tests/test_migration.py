"""What people of the seeds type: every row of the migration page does, or says, what it promises."""

import itertools
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from llmtool import cli
from llmtool.commands import migration
from llmtool.commands.migration import (
    COLOSSAL,
    COLOSSAL_SHORT_OPTIONS,
    CONFIG_NAMES,
    ENVIRONMENT,
    FDL,
    PAX_FLAGS,
    PLUGINS,
    SECTIONS,
    Row,
    colossal_overrides,
    environment_hints,
    fdl_overrides,
)
from llmtool.errors import BadRun
from llmtool.train.overrides import override, value_at
from llmtool.train.presets import RUNS, run_config

RUN = run_config("glam-126m-64e")
ROWS = list(itertools.chain(*SECTIONS.values()))
# param -> their value -> what it must make of a run
COLOSSAL_VALUES: dict[str, tuple[str, dict[str, Any]]] = {
    "strategy": ("zero2_cpu", {"strategy": "zero2", "offload": "optimizer"}),
    "epochs": ("2", {"data.epochs": 2.0}), "batch_per_device": ("16", {"batch_per_device": 16.0}),
    "learning_rate": ("3e-4", {"optimizer.learning_rate": 3e-4}),
    "weight_decay": ("0.2", {"optimizer.weight_decay": 0.2}),
    "warmup_steps": ("7", {"schedule.warmup_steps": 7}), "gradient_checkpoint": ("", {"remat": "full"}),
    "seq_len": ("1024", {"seq_len": 1024}), "precision": ("fp16", {"precision": "fp16"}),
    "save_interval": ("50", {"checkpoint.every_steps": 50}), "clip_norm": ("0.5", {"optimizer.clip_norm": 0.5}),
    "flash_attention": ("", {"attention": "auto"}),
}
FDL_VALUES: dict[str, tuple[str, dict[str, Any]]] = {
    "MAX_STEPS": ("100", {"steps": 100}), "PERCORE_BATCH_SIZE": ("0.5", {"batch_per_device": 0.5}),
    "ICI_MESH_SHAPE": ("[1, 8, 1]", {"mesh.ici": (1, 8, 1)}), "DCN_MESH_SHAPE": ("[1,32,1]", {"mesh.dcn": (1, 32, 1)}),
    "MAX_SEQ_LEN": ("1024", {"seq_len": 1024}), "LEARNING_RATE": ("1e-4", {"optimizer.learning_rate": 1e-4}),
    "ADAM_BETA1": ("0", {"optimizer.b1": 0.0}), "ADAM_BETA2": ("0.99", {"optimizer.b2": 0.99}),
    "ADAM_EPSILON": ("1e-6", {"optimizer.eps": 1e-6}), "ADAM_EPSILON_ROOT": ("1e-12", {"optimizer.eps_root": 1e-12}),
    "WEIGHT_DECAY": ("0.001", {"optimizer.weight_decay": 0.001}),
    "ADAM_CLIP_THRESHOLD": ("-1.0", {"optimizer.update_rms_cap": None}),
    "CLIP_GRADIENT_NORM_TO_VALUE": ("5.0", {"optimizer.clip_norm": 5.0}),
    "LR_SCHEDULE": ("'linear_rampup_cosine_decay'", {"schedule.kind": "pax"}),
    "LR_COS_WARMUP": ("500", {"schedule.warmup_steps": 500}),
    "LR_COS_DECAY_START": ("4001", {"schedule.decay_start": 4001}),
    "LR_COS_DECAY_END": ("300000", {"schedule.decay_end": 300_000}),
    "LR_COS_MIN_RATIO": ("0.2", {"schedule.min_ratio": 0.2}), "INIT_STD": ("0.006", {"init_std": 0.006}),
    "DROPOUT_PROB": ("0.1", {"dropout": 0.1}), "CHECKPOINT_EVERY_N_STEPS": ("250", {"checkpoint.every_steps": 250}),
    "CHECKPOINT_MAX_TO_KEEP": ("2", {"checkpoint.keep": 2}), "SUMMARY_INTERVAL_STEPS": ("10", {"log_every": 10}),
    "EVAL_INTERVAL_STEPS": ("50", {"evaluation.every_steps": 50}), "FPROP_DTYPE": ('"float32"', {"precision": "fp32"}),
    "CHECKPOINT_POLICY": ("SAVE_QKV_OUT_PROJ", {"remat": "save_qkv_out"}), "NUM_LAYERS": ("6", {"model.n_layers": 6}),
    "MODEL_DIMS": ("96", {"model.d_model": 96}), "HIDDEN_DIMS": ("32", {"model.d_ff": 32}),
    "DIMS_PER_HEAD": ("8", {"model.head_dim": 8}),
    "NUM_HEADS": ("3", {"model.n_heads": 3, "model.n_kv_heads": 3}),
    "VOCAB_SIZE": ("32000", {"model.vocab_size": 32000}),
}


def assert_changes(assignments: list[str], expected: dict[str, Any]) -> None:
    changed = override(RUN, assignments)
    assert {path: value_at(changed, path) for path in expected} == expected
    assert len(assignments) == len(expected)


def test_the_page_is_the_table(root: Path) -> None:
    """After a change: python -m llmtool.commands.migration > train/MIGRATION.md"""
    assert (root / "train" / "MIGRATION.md").read_text() == migration.page()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.theirs[0])
def test_a_row_is_a_choice_or_a_way_or_a_reason(row: Row) -> None:
    assert row.theirs and (row.ours is not None or len(row.says) > 10)
    if row.to is not None:
        assert row.ours is not None


@pytest.mark.parametrize("row", [row for row in COLOSSAL if row.param], ids=lambda row: row.param)
def test_colossal_options(row: Row) -> None:
    assert row.param is not None
    assert (row.param in COLOSSAL_VALUES) == (row.to is not None)
    if row.to is not None:
        value, expected = COLOSSAL_VALUES[row.param]
        assert_changes(colossal_overrides(row.param, value), expected)


@pytest.mark.parametrize("row", FDL, ids=lambda row: row.theirs[0])
def test_fdl(row: Row) -> None:
    for name in row.theirs:
        if row.to is None:
            with pytest.raises(BadRun) as caught:
                fdl_overrides([f"--fdl.{name}=True"])
            assert (row.says if row.ours is None else f"use {row.ours}") in str(caught.value)
        else:
            value, expected = FDL_VALUES[row.theirs[0]]
            assert_changes(fdl_overrides([f"--fdl.{name}={value}"]), expected)


def test_fdl_values_add_up_and_mistakes_are_named() -> None:
    both = fdl_overrides(["--fdl.MAX_STEPS=3", "--fdl.PERCORE_BATCH_SIZE=2"])
    assert_changes(both, {"steps": 3, "batch_per_device": 2})
    for argument, words in (
        ("--fdl.MAX_STEP=3", "did you mean MAX_STEPS?"), ("--fdl.ZZZ=3", "set ours: --set path=value"),
        ("--fdl.MAX_STEPS", "expected --fdl.MAX_STEPS=VALUE"),
        ("--fdl.LR_SCHEDULE=cubic", "'cubic' is not one we know"),
        ("--fdl.ADAM_CLIP_THRESHOLD=x", "'x' is not a number")):
        with pytest.raises(BadRun) as caught:
            fdl_overrides([argument])
        assert words in str(caught.value)


@pytest.mark.parametrize("row", ENVIRONMENT, ids=lambda row: row.theirs[0])
def test_environment(row: Row) -> None:
    """A variable of the scripts that is set gets a line with the way to go; one that JAX or NCCL reads gets none."""
    for name in row.theirs:
        hints = environment_hints({name: "1", "HOME": "/"})
        assert len(hints) == (not row.kept)
        assert all(hint.startswith(f"{name} is set, but is not read here: ") for hint in hints)
        assert row.kept or (row.ours or row.says) in hints[0]


@pytest.mark.parametrize("row", [row for row in PAX_FLAGS if row.to], ids=lambda row: row.theirs[0])
def test_pax_flags_that_are_choices(row: Row) -> None:
    assert row.to is not None
    assert_changes(row.to("False"), {"checkpoint.every_steps": None})
    assert row.to("True") == []


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_names_of_configurations(name: str) -> None:
    assert CONFIG_NAMES[name] in RUNS
    size = name.lower().removeprefix("pile").removeprefix("gpt").removeprefix("synthetic").removeprefix("glam")
    assert size.removeprefix("llama")[:2] in CONFIG_NAMES[name]


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins(name: str) -> None:
    run = override(run_config("llama2-7b"), colossal_overrides("strategy", name))
    assert (run.offload == "optimizer") == name.endswith(("_cpu", "_auto"))
    assert run.strategy == {"gemini": "fsdp", "zero2": "zero2", "hybrid": "hybrid", "fsdp": "fsdp", "3d": "hybrid"}[
        name.partition("_")[0]]


def test_spellings_do_not_clash_and_click_takes_them() -> None:
    """Each option of one command under all its names, a switch as a switch; -h and -q stay ours."""
    spellings = [name for names in COLOSSAL_SHORT_OPTIONS.values() for name in names]
    assert len(spellings) == len(set(spellings)) and not {"-h", "-q", "--help", "--json"} & set(spellings)
    seen: dict[str, Any] = {}
    switches = ("gradient_checkpoint", "flash_attention")
    command = click.Command("pretrain", callback=lambda **options: seen.update(options), params=[
        click.Option([param, *names], is_flag=param in switches) for param, names in COLOSSAL_SHORT_OPTIONS.items()])
    line = ("-c 7b -p gemini -d DATA -e 1 -b 2 --lr 3e-4 -w 0.1 -s 2000 -g -l 4096 -x bf16 -i 1000 -o OUT -f OLD "
            "--grad_clip 1.0 -a")
    assert CliRunner().invoke(command, line.split(), catch_exceptions=False).exit_code == 0
    assert set(seen) == set(COLOSSAL_SHORT_OPTIONS) and all(seen.values())
    for readme, code in (("--weight_decay", "--weigth_decay"), ("--gradient_clipping", "--grad_clip")):
        for name in (readme, code):
            CliRunner().invoke(command, [name, "9"], catch_exceptions=False)
            assert "9" in seen.values(), name
    for name in ("--gradient_checkpoint", "--grad_checkpoint"):
        CliRunner().invoke(command, [name], catch_exceptions=False)
        assert seen["gradient_checkpoint"] is True, name


def test_commands_and_options_that_the_page_names_exist() -> None:
    """Of commands that are there; a row may name one that is yet to come, and is then bound to its name."""
    for row in ROWS:
        words = (row.ours or "").replace("|", " ").split()
        if words[:1] == ["llmtool"] and words[1] in cli.cli.commands:
            command: click.Command = cli.cli.commands[words[1]]
            rest = words[2:]
            if isinstance(command, click.Group):
                command, rest = command.commands[rest[0]], rest[1:]
            known = {name for param in command.params for name in param.opts}
            assert {word for word in rest if word.startswith("--")} <= known, row
