"""What a clumsy and a hostile user do to a conversion, by kind: each test stands for its whole kind."""

import json
import os
import shutil
from pathlib import Path

import pytest

from llmtool.convert import convert_checkpoint, diff_checkpoints
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
