"""What a run saves: a native checkpoint that others read, and all that going on from it needs, on any mesh."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from llmtool.convert import convert_checkpoint, open_checkpoint
from llmtool.errors import BadCheckpoint, BadState
from llmtool.model.load import load_params
from llmtool.model.tree import flatten
from llmtool.train import array_folder, checkpoints
from llmtool.train.checkpoints import Checkpoints, SaveFailed
from llmtool.train.config import MeshConfig, RunConfig
from llmtool.train.overrides import from_json
from llmtool.train.state import TrainState, init_state, state_shardings
from tests.test_train_step import here, tiny

RUN = tiny(strategy="fsdp", batch_per_device=1)


def written(folder: Path, run: RunConfig = RUN, n_devices: int = 8, steps: tuple[int, ...] = (3,), **options: Any
            ) -> TrainState:
    """A run's folder with some steps, and the state saved last. Moments differ from each other and from the weights."""
    state = init_state(run, here(run, n_devices), options.pop("trainable", lambda key: True))
    opt = state.opt._replace(m={key: x + 1 for key, x in state.opt.m.items()},
                             v={key: x + 2 for key, x in state.opt.v.items()}, count=state.opt.count + 3)
    with Checkpoints(folder, keep=2) as saved:
        for step in steps:
            state = state.replace(step=state.step * 0 + step, opt=opt)
            saved.save(state, run, {"at": step}, options.get("files"))
            saved.wait()
    return state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainState]:
    path = tmp_path_factory.mktemp("run")
    return path, written(path, steps=(1, 2, 3), files={"tokenizer.json": b"{}"})


@pytest.mark.parametrize(("name", "mesh", "n_devices"), [
    ("fsdp", MeshConfig(), 1), ("fsdp", MeshConfig((1, 2, 4)), 8), ("zero2", MeshConfig(), 2),
    ("hybrid", MeshConfig((2, 1, 2)), 4),
])  # fmt: skip
def test_restored_on_any_mesh(folder: tuple[Path, TrainState], name: Any, mesh: MeshConfig, n_devices: int) -> None:
    run = replace(RUN, strategy=name, mesh=mesh, batch_per_device=8)
    with Checkpoints(folder[0], keep=2) as saved:
        state, told = saved.restore(run, here(run, n_devices))
    jax.tree.map(np.testing.assert_array_equal, state, folder[1])
    assert jax.tree.map(lambda x: x.sharding, state) == state_shardings(state, here(run, n_devices))
    assert (told.step, told.data) == (3, {"at": 3})
    assert from_json(told.config, "run.json") == RUN


def test_old_steps_go_and_any_can_be_had(folder: tuple[Path, TrainState]) -> None:
    with Checkpoints(folder[0], keep=2) as saved:
        assert saved.steps() == [2, 3]
        state, told = saved.restore(RUN, here(RUN, 8), step=2)
        assert int(state.step) == told.step == 2
        with pytest.raises(BadCheckpoint, match="no complete step 1; there are: 2, 3"):
            saved.restore(RUN, here(RUN, 8), step=1)


def test_every_level_of_a_run_is_a_checkpoint(folder: tuple[Path, TrainState], tmp_path: Path) -> None:
    levels = (folder[0], folder[0] / "checkpoints", folder[0] / "checkpoints/3", folder[0] / "checkpoints/3/model")
    for path in levels:
        with open_checkpoint(path) as opened:
            assert (opened.layout, opened.step, opened.known_config()) == ("native", 3, RUN.model)
            np.testing.assert_array_equal(opened.weight("layers.1.attn.out.w"), np.asarray(
                folder[1].params["layers.block_0.attn.out.w"])[1])
            assert (opened.root / "tokenizer.json").read_bytes() == b"{}"
    with open_checkpoint(folder[0], step=2) as opened:
        assert opened.step == 2
    with pytest.raises(BadCheckpoint, match="no step 7; it holds: 2, 3"):
        open_checkpoint(folder[0], step=7)
    with pytest.raises(BadCheckpoint, match="this is step 3, not the step 2"):
        open_checkpoint(levels[2], step=2)
    report = convert_checkpoint(folder[0], tmp_path / "hf", to="hf")
    assert report.from_word == "native" and (tmp_path / "hf/tokenizer.json").exists()
    with open_checkpoint(tmp_path / "hf") as opened:
        np.testing.assert_array_equal(flatten(load_params(opened, RUN.model))["embed"], folder[1].params["embed"])


def test_orbax_restores_the_weights_by_itself(folder: tuple[Path, TrainState]) -> None:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        tree = checkpointer.restore(folder[0] / "checkpoints/3/model/params")
    flat = flatten(tree)
    assert set(flat) == set(folder[1].params)
    jax.tree.map(np.testing.assert_array_equal, flat, folder[1].params)


def test_unfinished_steps_are_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    half = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp"  # what a process that was killed leaves
    (half / "model/params").mkdir(parents=True)
    (half / "model/model.json").write_text("{}")
    (tmp_path / "checkpoints" / "8").mkdir()  # and one that a careless copy left
    with open_checkpoint(tmp_path) as opened:
        assert opened.step == 3
    with Checkpoints(tmp_path, keep=2) as saved:
        assert saved.steps() == [3]


CHANGES: dict[str, tuple[Callable[[RunConfig], RunConfig], str]] = {
    "deeper": (lambda run: replace(run, model=replace(run.model, n_layers=3)), r"is float32 \[2, 16, 24\], this run's"),
    "wider": (lambda run: replace(run, model=replace(run.model, d_ff=32)), r"mlp\.gate\.w is float32 \[2, 16, 24\]"),
    "biased": (lambda run: replace(run, model=replace(run.model, qkv_bias=True)), r"missing: layers\.block_0\.attn\.q"),
    "tied": (lambda run: replace(run, model=replace(run.model, tied=True)), r"not of this run: unembed\.w \[16, 29\]"),
    "scaled": (lambda run: replace(run, precision="fp16"), r"missing: loss_scale \[\]"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_models_state_is_refused_in_few_words(folder: tuple[Path, TrainState], change: str) -> None:
    changed, message = CHANGES[change]
    run = changed(RUN)
    with Checkpoints(folder[0], keep=2) as saved, pytest.raises(BadState, match=message) as caught:
        saved.restore(run, here(run, 8))
    assert len(str(caught.value).splitlines()) <= 12


def test_long_lists_of_differences_are_cut() -> None:
    wanted = {f"w{i}": jax.ShapeDtypeStruct((2,), np.float32) for i in range(25)}
    with pytest.raises(BadState, match="and 15 more of the kind") as caught:
        array_folder.check_same({"other": ((3,), np.dtype(np.float32))}, wanted, "not this")
    assert len(str(caught.value).splitlines()) == 13


def test_frozen_leaves_have_no_moments_on_disk(tmp_path: Path) -> None:
    def trainable(key: str) -> bool:
        return ".attn." in key

    state = written(tmp_path, trainable=trainable)
    names = {path.name for path in (tmp_path / "checkpoints/3/trainer/arrays").iterdir()}
    assert {name[2:] for name in names if name.startswith("m.")} == set(state.opt.m)
    with Checkpoints(tmp_path, keep=2) as saved:
        again, _ = saved.restore(RUN, here(RUN, 8), trainable)
        jax.tree.map(np.testing.assert_array_equal, again, state)
        with pytest.raises(BadState, match=r"--ckpt(?s:.)*missing: m\.embed "):
            saved.restore(RUN, here(RUN, 8))


def test_offloaded_state_comes_back_to_host_memory(tmp_path: Path) -> None:
    run = replace(RUN, offload="optimizer")
    state = written(tmp_path, run=run)
    with Checkpoints(tmp_path, keep=2) as saved:
        again, _ = saved.restore(run, here(run, 8))
    jax.tree.map(np.testing.assert_array_equal, again, state)
    assert {x.sharding.memory_kind for x in again.opt.m.values()} == {"pinned_host"}


def test_a_save_is_of_the_moment_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers are given to the next step while the writer has not begun."""
    import threading

    go, write = threading.Event(), checkpoints._write
    monkeypatch.setattr(checkpoints, "_write", lambda *args: (go.wait(60), write(*args)))
    state = init_state(RUN, here(RUN, 8))
    before = np.array(state.params["embed"])
    with Checkpoints(tmp_path, keep=2) as saved:
        saved.save(state, RUN, None)
        again = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(state)
        jax.block_until_ready(again)
        go.set()
        saved.wait()
    with open_checkpoint(tmp_path) as opened:
        np.testing.assert_array_equal(opened.weight("embed"), before)


def test_a_failed_background_save_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_write", full)
    with pytest.raises(SaveFailed, match="No space left on device"), Checkpoints(tmp_path, keep=2) as saved:
        saved.save(init_state(RUN, here(RUN, 8)), RUN, None)
        saved.wait()
    assert not list((tmp_path / "checkpoints").glob("[0-9]"))


def test_a_run_json_of_another_schema_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "checkpoints/3/trainer/run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": "llmtool.run-state/9"}))
    with Checkpoints(tmp_path, keep=2) as saved, pytest.raises(BadCheckpoint, match="run-state/9"):
        saved.restore(RUN, here(RUN, 8))
