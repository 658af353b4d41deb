"""What a clumsy and a hostile user do to a conversion, by kind: each test stands for its whole kind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest

from llmtool.cli import main
from llmtool.convert import convert_checkpoint, diff_checkpoints, open_checkpoint
from llmtool.convert.casting import cast_into
from llmtool.convert.layout_word import parse_word
from llmtool.convert.manifest import NAME
from llmtool.convert.stores.base import DTYPES
from llmtool.errors import BadCheckpoint, BadTarget, Contradiction, LlmtoolError, PlanError, UnknownLayout
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


# manifests that lie, are stale, or belong to another checkpoint


def test_a_manifest_of_another_checkpoint_tells_nothing(tmp_path):
    """Beside a folder whose facts hang on it, it is refused; beside a config.json it is passed over with a note."""
    convert_checkpoint(ORACLE / "hf_llama_mha_tied", tmp_path / "other", to="pax:rope=half")
    folder = copied("pax_llama_gqa", tmp_path / "pax")
    shutil.copy(tmp_path / "other" / NAME, folder)
    with pytest.raises(Contradiction, match=f"{NAME}: tells of another checkpoint.*--from"):
        open_checkpoint(folder)
    for to in ("hf", "meta", "native"):
        convert_checkpoint(LLAMA, tmp_path / to, to=to)
        shutil.copy(tmp_path / "other" / NAME, tmp_path / to)
        with open_checkpoint(tmp_path / to) as checkpoint:
            assert checkpoint.manifest is None and "another checkpoint" in str(checkpoint.describe())
        assert diff_checkpoints(LLAMA, tmp_path / to).equal


@pytest.mark.parametrize("changed", [False, True])
def test_scales_trained_since_in_float32_are_not_rounded_back(tmp_path, changed):
    """A manifest says that bfloat16 scales were widened for Pax. What was trained since stays float32."""
    source = convert_checkpoint(ORACLE / "hf_gpt2", tmp_path / "bf16", to="hf", dtype="bf16").target
    convert_checkpoint(source, tmp_path / "pax", to="pax")
    scale = next((tmp_path / "pax").rglob("mdl_vars.params.lm.final_ln.scale")) / "0"
    trained = np.frombuffer(scale.read_bytes(), np.float32) + np.float32(changed * 1e-4)
    scale.write_bytes(trained.tobytes())
    report = convert_checkpoint(tmp_path / "pax", tmp_path / "hf", to="hf")
    assert report.dtypes.get("float32", 0) == changed
    assert any("changed since the manifest" in note for note in report.notes) == changed
    assert diff_checkpoints(tmp_path / "pax", tmp_path / "hf").equal
    assert diff_checkpoints(source, tmp_path / "hf").equal != changed


LIES = {
    "model": [{"n_experts": "x"}, {"block_period": 0}, {"block_period": -2}, {"norm": "batchnorm"}, {"activation": 7},
              {"norm_eps": "1e-5"}, {"rope_theta": True}, {"family": ["llama"]}, {"n_experts": 1 << 17}],
    "step": ["x", -3, 1 << 80, 1.5, True],
    "layout": ["pax:rope=zzz", 5, "nonsense"],
    "tensors": [[], {"a": 5}, {"a[x]": {"shape": []}}, {"a": {"shape": 3}}],
    "restore": [[], {"norm.scale": "int8"}, {"norm.scale": []}],
    "remainders": ["../../etc/passwd", 7],
}  # fmt: skip


@pytest.mark.parametrize("key, lie", [(key, lie) for key, lies in LIES.items() for lie in lies])
def test_a_manifest_that_lies_is_one_message_that_names_it(tmp_path, key, lie):
    convert_checkpoint(LLAMA, tmp_path / "pax", to="pax")
    path = tmp_path / "pax" / NAME
    model = json.loads(path.read_text())["model"]
    edited(path, **{key: model | lie if key == "model" else lie})
    with pytest.raises(LlmtoolError, match=NAME):
        convert_checkpoint(tmp_path / "pax", tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()


def test_small_files_cannot_ask_for_more_parts_than_memory_holds(tmp_path):
    """Every layer and expert is listed by name, so their number is bounded wherever it comes from."""
    convert_checkpoint(LLAMA, tmp_path / "native", to="native")
    experts = {"n_layers": 1 << 16, "n_experts": 1 << 16, "moe_layers_in_block": [0], "expert_d_ff": 4}
    edited(tmp_path / "native" / "model.json", **experts)
    shutil.copytree(ORACLE / "hf_mixtral", tmp_path / "hf")
    edited(tmp_path / "hf" / "config.json", num_hidden_layers=1 << 16, num_local_experts=1 << 16)
    stacked = copied("pax_llama_gqa_repeat", tmp_path / "pax")
    for folder in (path.parent for path in stacked.rglob(".zarray") if ".repeat." in path.parent.name):
        data = json.loads((folder / ".zarray").read_text())
        shape = [1 << 20, *[1] * (len(data["shape"]) - 1)]
        for chunk in folder.glob("[0-9]*"):
            chunk.unlink()
        (folder / ".".join("0" * len(shape))).write_bytes(zlib.compress(bytes(4 << 20)))
        edited(folder / ".zarray", shape=shape, chunks=shape, dtype="<f4", compressor={"id": "zlib"})
    shutil.rmtree(next(stacked.rglob("metadata")))
    for name in ("native", "hf", "pax"):
        with pytest.raises(LlmtoolError, match=f"{name}.*at most"):
            open_checkpoint(tmp_path / name)


# Pax folders


def zarr(folder: Path, x: np.ndarray) -> None:
    """Put another array, in one chunk, where a zarr array is."""
    shutil.rmtree(folder)
    folder.mkdir()
    meta = {"chunks": [max(n, 1) for n in x.shape], "compressor": None, "dtype": x.dtype.str, "fill_value": None,
            "filters": None, "order": "C", "shape": list(x.shape), "zarr_format": 2}  # fmt: skip
    (folder / ".zarray").write_text(json.dumps(meta))
    if x.size:
        (folder / (".".join("0" * x.ndim) or "0")).write_bytes(x.tobytes())


STEPS = (np.int32(-5), np.float32("nan"), np.zeros(0, "i4"), np.zeros(2, "i4"), np.uint64(1 << 63))


@pytest.mark.parametrize("value", STEPS)
def test_a_step_is_one_whole_number(tmp_path, value):
    folder = copied("pax_llama_gqa_weightsonly", tmp_path / "pax")
    zarr(next(folder.rglob("step")), np.asarray(value))
    with pytest.raises(BadCheckpoint, match="training step"):
        convert_checkpoint(folder, tmp_path / "out", to="te")
    assert [path.name for path in tmp_path.iterdir()] == ["pax"]


def test_one_step_under_two_names_is_not_chosen_by_chance(tmp_path):
    steps = copied("pax_llama_gqa_weightsonly", tmp_path / "pax") / "checkpoints"
    shutil.copytree(steps / "checkpoint_00000000", steps / "checkpoint_0")
    with pytest.raises(BadCheckpoint, match="checkpoint_0 and checkpoint_00000000 are the same step"):
        open_checkpoint(tmp_path / "pax")


def test_a_fill_value_that_its_dtype_lacks_is_refused_without_a_warning(tmp_path):
    folder = copied("pax_llama_gqa_weightsonly", tmp_path / "pax")
    edited(next(folder.rglob("mdl_vars*final_ln.scale")) / ".zarray", fill_value=1e308)
    with warnings.catch_warnings(), pytest.raises(BadCheckpoint, match="fill_value"):
        warnings.simplefilter("error")
        open_checkpoint(folder)


SIZED = {
    "pax_llama_gqa_weightsonly": ("softmax.logits_ffn.linear.w", "x_layers_0.self_attention.query.w",
                                  "x_layers_0.self_attention.key.w", "x_layers_0.ff_layer.ffn_layer1.linear.w"),
    "pax_llama_mha": ("x_layers_0.self_attention.combined_qkv.w",),
    "pax_llama_gqa_repeat": ("x_layers_0.self_attention.query.w", "x_layers_0.layer_norm.scale"),
    "pax_gpt": ("position_emb.emb_var",),
    "pax_glam": ("softmax.embedding.w", "x_layers_0.self_attention.relative_bias.wrb", "x_layers_0.ff_layer.gate"),
    "nv_llama_gqa_te": ("attention.out.kernel", "attention.kv.kernel", "mlp.wi_kernel"),
}  # fmt: skip


@pytest.mark.parametrize("name, key", [(name, key) for name, keys in SIZED.items() for key in keys])
def test_arrays_of_any_shape_are_answered_with_a_message(tmp_path, name, key):
    """Sizes are read off shapes that anybody may have written."""
    folder = copied(name, tmp_path / "pax")
    for metadata in folder.rglob("metadata"):
        shutil.rmtree(metadata, ignore_errors=True)
    array = next(path for path in sorted(folder.rglob(f"mdl_vars*{key}")))
    word, heads = ("te:gate=linear_first", {"n_heads": 4}) if name.startswith("nv") else (None, None)
    for shape in ((), (5,), (1, 0), (3, 3), (0, 0, 0), (2, 2, 2, 2, 2)):
        zarr(array, np.zeros(shape, np.float32))
        with pytest.raises(LlmtoolError, match=str(folder)):
            convert_checkpoint(folder, tmp_path / "out", to="pax", from_=word, expected=heads)
    assert not (tmp_path / "out").exists()


# layout words


@pytest.mark.parametrize("word", ["meta:shards=" + "9" * 5000, "pax:chunk=" + "9" * 5000, "pax:chunk=99999999999999"])
def test_numbers_of_any_length_are_answered_with_a_short_message(word):
    with pytest.raises(UnknownLayout, match="expected a whole number from 1 to 2147483647") as raised:
        parse_word(word)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("name, word, said", [
    ("meta_llama2_gqa_mp2", "meta:shards=8", "shards is 2, but the layout word says shards=8"),
    ("meta_llama2_gqa_mp2", "meta:split=vocab", "split is width, but the layout word says split=vocab"),
    ("meta_llama3_gqa_mp2", "meta:split=width", "split is vocab, but the layout word says split=width"),
    ("pax_llama_gqa", "pax:format=flat", "format is zarr, but the layout word says format=flat"),
    ("meta_llama2_gqa_mp2_saxml", "pax:format=bare", "format is zarr, but the layout word says format=bare"),
])  # fmt: skip
def test_what_the_files_show_cannot_be_said_otherwise(name, word, said):
    with pytest.raises(Contradiction, match=said):
        open_checkpoint(ORACLE / name, layout=word)


def test_what_only_a_target_has_is_no_part_of_a_sources_word():
    for name, word in (("hf_llama_gqa", "hf:shard_size=1KB"), ("pax_llama_gqa", "pax:chunk=8")):
        with open_checkpoint(ORACLE / name, layout=word) as checkpoint:
            assert not {"shard_size", "chunk"} & checkpoint.word.options.keys()


# Meta


@pytest.mark.parametrize("params", [{"model": "llama"}, {"model": []}, {"dim": "16"}, {"dim": None}, {}, {"dim": -16}])
def test_a_params_json_of_any_shape_is_answered_with_a_message(tmp_path, params):
    folder = copied("meta_llama2_gqa_mp2", tmp_path / "meta")
    (folder / "params.json").write_text(json.dumps(params))
    with pytest.raises(LlmtoolError, match=r"params\.json"):
        open_checkpoint(folder)


def test_every_rank_of_meta_gets_whole_heads(tmp_path):
    """4 heads and 2 key/value heads: 4 ranks would each hold half a key/value head, which Meta's code cannot load."""
    for to, said in (("meta:shards=4", "2 key/value heads"), ("meta:shards=8", "4 heads")):
        with pytest.raises(PlanError, match=f"{said} do not divide into"):
            convert_checkpoint(LLAMA, tmp_path / "out", to=to)
    convert_checkpoint(LLAMA, tmp_path / "out", to="meta:shards=2")


# diff


@pytest.mark.parametrize("tolerance", [float("nan"), float("inf"), -1e-9])
def test_no_tolerance_makes_everything_equal(tmp_path, tolerance):
    with pytest.raises(LlmtoolError, match="expected a finite number"):
        diff_checkpoints(LLAMA, LLAMA, tolerance=tolerance)
    for args in (["diff", str(LLAMA), str(LLAMA), "--tolerance", str(tolerance), *more] for more in ([], ["--json"])):
        assert main(args) == 2


def test_equal_weights_of_models_that_compute_something_else_are_noted(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    for name, change in (("rope_theta", {"rope_theta": 250000.0, "rope_parameters": ...}),
                         ("rope_scaling", {"rope_scaling": scaling, "rope_theta": 10000.0, "rope_parameters": ...}),
                         ("norm_eps", {"rms_norm_eps": 1e-3})):  # fmt: skip
        edited(copied("hf_llama_gqa", tmp_path / name) / "config.json", **change)
        found = diff_checkpoints(LLAMA, tmp_path / name)
        assert found.equal and [note for note in found.notes if note.startswith(f"{name} is ")]
    assert not any("what they compute" in note for note in diff_checkpoints(LLAMA, LLAMA).notes)


# the command line in a rough place


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which ``$L`` is llmtool."""
    environ = os.environ | {"L": f"{sys.executable} -m llmtool", "PYTHONPATH": str(ORACLE.parents[2])}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, env=environ)


@pytest.mark.parametrize("line, status", [
    ("$L inspect {sample} >&-", 0),
    ("$L inspect {sample} --json >&-", 0),
    ("$L inspect {sample} 2>&-", 0),
    ("$L inspect /nowhere --json 2>&-", 2),
    ("$L inspect {sample} >/dev/full", 2),
    ("$L inspect {sample} --json >/dev/full", 2),
    ("$L inspect /nowhere --json >/dev/full", 2),
    ("$L inspect /nowhere --json | true; exit ${{PIPESTATUS[0]}}", None),
    ("$L inspect {sample} | true; exit ${{PIPESTATUS[0]}}", None),
    ("PYTHONIOENCODING=ascii $L inspect {sample}", 0),
    ("PYTHONIOENCODING=ascii $L inspect /nöwhere", 2),
    ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 $L inspect {sample}", 0),
])  # fmt: skip
def test_closed_full_broken_and_narrow_streams_end_without_a_traceback(line, status):
    done = shell(line.format(sample=LLAMA))
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.returncode == status if status is not None else done.returncode in (0, 2, 141)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_takes_the_half_written_output_away(tmp_path, number):
    code = """
        import os, signal, sys
        from llmtool import cli
        from llmtool.convert import converting
        write = converting.carry
        def stop(*args, **facts):
            write(*args, **facts)
            os.kill(os.getpid(), int(sys.argv[1]))
            signal.pause()
        converting.carry = stop
        sys.exit(cli.main(["convert", *sys.argv[2:]]))
    """
    args = [str(int(number)), str(LLAMA), str(tmp_path / "out"), "--to", "hf", "--overwrite", "--json"]
    convert_checkpoint(LLAMA, tmp_path / "out", to="meta")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 128 + number and "Traceback" not in done.stderr
    assert json.loads(done.stdout)["schema"] == "llmtool.error/1"
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out" / "params.json").exists()


# PyTorch files


@pytest.mark.parametrize("legacy", [False, True])
def test_views_in_a_pytorch_file_are_read_right_or_refused(tmp_path, legacy):
    """However a tensor lies in its storage; one that negates its storage lazily is refused."""
    import torch
    from safetensors.torch import load_file

    sample = ORACLE / "hf_llama_mha_tied"
    plain = {key: x for file in sample.glob("*.safetensors") for key, x in load_file(file).items()}
    everything, begin, shared = torch.cat([x.flatten() for x in plain.values()]), 0, {}
    for key, x in plain.items():
        begin, shared[key] = begin + x.numel(), everything[begin : begin + x.numel()].view(x.shape)
    for name, content in {
        "columns first": {key: x.t().contiguous().t() if x.ndim == 2 else x for key, x in plain.items()},
        "every second": {key: torch.stack([x, x + 1], -1)[..., 0] for key, x in plain.items()},
        "one storage": shared,
        "in a wrapper": {"model": plain, "epoch": 3},
        "negated": {key: torch._neg_view(-x) for key, x in plain.items()},
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(sample / "config.json", folder)
        torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        if name == "negated":
            with pytest.raises(BadCheckpoint, match="resolve_neg"):
                open_checkpoint(folder)
        else:
            assert diff_checkpoints(sample, folder).equal


# sidecars


@pytest.mark.parametrize("name, file", [
    ("hf_llama_gqa", "config.json"), ("meta_llama2_gqa_mp2", "params.json"), ("pax_llama_gqa", "metadata/metadata"),
])  # fmt: skip
def test_deeply_nested_json_is_refused_before_anything_recurses(tmp_path, name, file):
    """A parser of one version of Python goes deeper than the code that walks what it parsed."""
    folder = copied(name, tmp_path / "in")
    path = next(folder.rglob(file))
    for text in ('{"a":' * 500 + "{}" + "}" * 500, "[" * 500 + "]" * 500):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"deep": "@"}).replace('"@"', text))
        with pytest.raises(BadCheckpoint, match=f"{path.name}: nested too deeply"):
            open_checkpoint(folder)
        path.write_text((ORACLE / name / path.relative_to(folder)).read_text())


@pytest.mark.parametrize("kinds", [1, "full_attention", {"a": 1}, [["full_attention"]], True])
def test_layer_types_of_any_type_are_answered_with_a_message(tmp_path, kinds):
    folder = copied("hf_llama_gqa", tmp_path / "in")
    edited(folder / "config.json", layer_types=kinds)
    with pytest.raises(LlmtoolError, match="layer_types"):
        open_checkpoint(folder)
