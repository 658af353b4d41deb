"""What a clumsy and a hostile user do to a conversion, by kind: each test stands for its whole kind."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from llmtool.convert import convert_checkpoint, diff_checkpoints
from llmtool.convert.casting import cast_into
from llmtool.convert.stores.base import DTYPES
from llmtool.errors import BadTarget, LlmtoolError
from tests.oracles import ORACLE

LLAMA, PAX = ORACLE / "hf_llama_gqa", ORACLE / "pax_llama_gqa"


def copied(name: str, folder: Path) -> Path:
    """A sample to be damaged."""
    return Path(shutil.copytree(ORACLE / name, folder))


def edited(path: Path, **changes: object) -> None:
    """A JSON file with other values; ``...`` takes a key away."""
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


# --overwrite and where the output goes


def test_overwrite_loses_nothing_but_one_checkpoint(tmp_path):
    """A training run of several steps, a project with weights in it: all of it is there afterwards."""
    run = copied("pax_llama_gqa", tmp_path / "run")
    shutil.copytree(run / "checkpoints" / "checkpoint_00000000", run / "checkpoints" / "checkpoint_00000010")
    convert_checkpoint(LLAMA, tmp_path / "project", to="hf")
    for name in ("thesis.tex", ".git", "weights_of_mine.safetensors"):
        (tmp_path / "project" / name).write_text("three years")
    for folder, mine in ((run, "checkpoint_00000010"), (tmp_path / "project", "thesis.tex")):
        before = sorted(folder.rglob("*"))
        with pytest.raises(BadTarget, match=mine):
            convert_checkpoint(LLAMA, folder, to="pax", overwrite=True)
        assert sorted(folder.rglob("*")) == before
    for to in ("hf", "hf:shard_size=4KB", "meta:shards=2", "native", "pax", "te:format=flat", "pax:format=bare", "hf"):
        convert_checkpoint(LLAMA, tmp_path / "out", to=to, overwrite=True)  # what we wrote is ours to replace
        assert diff_checkpoints(LLAMA, tmp_path / "out").equal


def test_a_folder_that_cannot_be_replaced_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self == mounted)
    for target, said in ((Path("."), "folder that you are in"), (Path(".."), "folder that you are in"),
                         (tmp_path / "here", "folder that you are in"), (mounted, "mounted")):  # fmt: skip
        with pytest.raises(LlmtoolError, match=said):
            convert_checkpoint(LLAMA, target, to="hf", dry_run=True)
    (tmp_path / "link").symlink_to(tmp_path / "here")
    convert_checkpoint(LLAMA, tmp_path / "link" / "out", to="hf")
    convert_checkpoint(LLAMA, "../out2", to="hf")
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["below", "out", "out2"]
    assert not any((tmp_path / "here" / "below").iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "Input/output error")])
def test_what_was_there_comes_back_when_the_last_step_fails(tmp_path, monkeypatch, error):
    convert_checkpoint(LLAMA, tmp_path / "out", to="hf")
    rename = os.rename

    def failing(source, target):
        if Path(source).name.startswith(".out.llmtool") and not str(source).endswith(".old"):
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises((KeyboardInterrupt, BadTarget)):
        convert_checkpoint(LLAMA, tmp_path / "out", to="pax", overwrite=True)
    assert diff_checkpoints(LLAMA, tmp_path / "out").equal
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# values


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_a_cast_from_float64_rounds_once(dtype):
    """Between any two neighbours, a hair above the middle goes up and a hair below goes down; float32 sees no hair."""
    bits = np.dtype(f"u{DTYPES[dtype].itemsize}")
    with np.errstate(invalid="ignore"):
        grid = np.arange(1 << 8 * bits.itemsize, dtype=np.uint32).astype(bits).view(DTYPES[dtype]).astype(np.float64)
    grid = np.unique(grid[np.isfinite(grid)])
    middle = (grid[1:] + grid[:-1]) / 2
    out = np.empty((2, len(middle)), DTYPES[dtype])
    cast_into(out, np.stack([np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)]))
    assert np.array_equal(out.astype(np.float64), np.stack([grid[1:], grid[:-1]]))
    odd = np.array([np.nan, np.inf, -0.0, 1e300])
    cast_into(odd_out := np.empty(4, DTYPES[dtype]), odd)
    assert np.isnan(odd_out[0]) and np.signbit(odd_out[2]) and not np.isfinite(odd_out[3])
