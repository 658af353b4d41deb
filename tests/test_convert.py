"""A conversion end to end: dtypes, shifted scales, sidecars, targets, and what is odd or damaged."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmtool.convert import convert_checkpoint, diff_checkpoints, open_checkpoint
from llmtool.convert.manifest import NAME, REMAINDERS, read_manifest
from llmtool.convert.pax_folder import find_step
from llmtool.convert.stores.zarr import ZarrSource
from llmtool.errors import BadCheckpoint, BadTarget, Contradiction, LlmtoolError, MissingFact, PlanError, UnknownLayout
from tests.oracles import ORACLE, sample_config

LLAMA, GPT = ORACLE / "hf_llama_gqa", ORACLE / "hf_gpt2"


def hf_copy(folder: Path, change=None, source: Path = LLAMA, **config) -> Path:
    """A one-file copy of a Hugging Face sample; ``change`` edits its arrays, ``config`` its config.json."""
    folder.mkdir(parents=True)
    arrays = {key: x for file in sorted(source.glob("*.safetensors")) for key, x in load_file(file).items()}
    if change:
        change(arrays)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    data = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))
    return folder


# dtypes


def test_the_default_keeps_every_bit_and_a_cast_counts_what_it_did(tmp_path):
    values = np.array([3.1e-6, 7e-9, 70000, -1.5], ml_dtypes.bfloat16)

    def change(arrays):
        for key in arrays:
            arrays[key] = arrays[key].astype(ml_dtypes.bfloat16)
        arrays["model.norm.weight"][:4] = values

    source = hf_copy(tmp_path / "bf16", change, torch_dtype="bfloat16", dtype=...)
    kept = convert_checkpoint(source, tmp_path / "kept", to="hf")
    assert kept.bytes_read == kept.bytes_written and not kept.casts
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "kept", source))
    assert all(ours[key].tobytes() == theirs[key].tobytes() for key in theirs)

    cast = convert_checkpoint(source, tmp_path / "f16", to="hf", dtype="fp16")
    (row,) = [row for row in cast.casts if row["array"] == "model.norm.weight"]
    assert (row["overflow"], row["underflow"]) == (1, 1) and row["changed"] >= 2
    assert any("1 overflowed to infinity, 1 underflowed to zero" in note for note in cast.notes)
    assert json.loads((tmp_path / "f16" / "config.json").read_text())["torch_dtype"] == "float16"
    wide = convert_checkpoint(source, tmp_path / "f32", to="meta", dtype="float32")
    assert not wide.casts and diff_checkpoints(source, tmp_path / "f32").equal  # widening changes no value


def test_an_unknown_dtype_is_named(tmp_path):
    with pytest.raises(UnknownLayout, match=r"float31.*expected float32"):
        convert_checkpoint(LLAMA, tmp_path / "x", to="hf", dtype="float31")


def test_a_half_precision_norm_scale_widens_in_pax_and_narrows_on_the_way_back(tmp_path):
    def change(arrays):
        for key in arrays:
            arrays[key] = arrays[key].astype(ml_dtypes.bfloat16)
        arrays["transformer.ln_f.weight"][:3] = [0.0009765625, -0.5, 1.75]

    source = hf_copy(tmp_path / "gpt", change, GPT, dtype="bfloat16")
    report = convert_checkpoint(source, tmp_path / "pax", to="pax")
    assert report.dtypes == {"bfloat16": 23, "float32": 5}
    assert any("5 norm scales become float32" in note for note in report.notes)
    state = ZarrSource(tmp_path / "pax" / "checkpoints" / "checkpoint_00000000" / "state")
    assert state.read("mdl_vars.params.lm.final_ln.scale")[:3].tolist() == [0.0009765625 - 1, -1.5, 0.75]
    convert_checkpoint(tmp_path / "pax", tmp_path / "te", to="te")  # the widening is remembered through TE
    back = convert_checkpoint(tmp_path / "te", tmp_path / "back", to="hf")
    assert back.dtypes == {"bfloat16": 28}
    assert diff_checkpoints(source, tmp_path / "back").to_json()["dtypes"] == []
    twice = convert_checkpoint(tmp_path / "back", tmp_path / "again", to="pax")
    assert twice.dtypes == report.dtypes and diff_checkpoints(tmp_path / "pax", tmp_path / "again").equal


def test_what_rounding_takes_from_a_scale_is_kept_beside_the_weights(tmp_path):
    config = sample_config("pax_gpt")
    report = convert_checkpoint(ORACLE / "pax_gpt", tmp_path / "hf", to="hf", model_config=config)
    assert any("norm scale values were rounded" in note for note in report.notes)
    assert (tmp_path / "hf" / REMAINDERS).is_file()
    convert_checkpoint(tmp_path / "hf", tmp_path / "pax", to="pax")
    assert diff_checkpoints(ORACLE / "pax_gpt", tmp_path / "pax").max_abs_diff == 0
    convert_checkpoint(tmp_path / "hf", tmp_path / "hf2", to="hf:shard_size=2KB")  # remainders travel with it
    assert diff_checkpoints(ORACLE / "pax_gpt", tmp_path / "hf2", model_config=None).max_abs_diff == 0

    arrays = load_file(tmp_path / "hf" / "model.safetensors")
    arrays["transformer.ln_f.weight"] = arrays["transformer.ln_f.weight"] * np.float32(2)  # trained on: stale
    save_file(arrays, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    report = convert_checkpoint(tmp_path / "hf", tmp_path / "pax2", to="pax")
    assert any(
        "changed since the manifest was written" in note and "transformer.ln_f.weight" in note for note in report.notes
    )
    state = ZarrSource(tmp_path / "pax2" / "checkpoints" / "checkpoint_00000000" / "state")
    assert np.array_equal(state.read("mdl_vars.params.lm.final_ln.scale"), arrays["transformer.ln_f.weight"] - 1)


# sidecars and the manifest


def test_tokenizer_and_generation_files_travel_through_every_layout(tmp_path):
    source = hf_copy(tmp_path / "hf0")
    files = {
        "tokenizer.json": b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
        "chat_template.jinja": b"{{ x }}",
        "generation_config.json": b'{"eos_token_id": [2, 3]}',
        "special_tokens_map.json": b"{}",
    }
    for name, data in files.items():
        (source / name).write_bytes(data)
    before = source
    for number, to in enumerate(("meta", "pax", "te", "native", "hf"), 1):
        after = tmp_path / f"{to}{number}"
        convert_checkpoint(before, after, to=to)
        assert {name: (after / name).read_bytes() for name in files} == files, to
        before = after
    ours = json.loads((before / "config.json").read_text())
    theirs = json.loads((source / "config.json").read_text())
    for key in ("rms_norm_eps", "num_key_value_heads", "max_position_embeddings", "eos_token_id", "head_dim"):
        assert ours[key] == theirs[key], key
    assert ours["rope_theta"] == theirs["rope_parameters"]["rope_theta"]


def test_rope_scaling_survives_every_layout(tmp_path):
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    before = hf_copy(tmp_path / "hf0", rope_parameters=..., rope_scaling=scaling, rope_theta=250000.0)
    for number, to in enumerate(("meta", "pax", "te", "native", "hf"), 1):
        convert_checkpoint(before, tmp_path / str(number), to=to)
        before = tmp_path / str(number)
    data = json.loads((before / "config.json").read_text())
    assert data["rope_scaling"] == scaling and data["rope_theta"] == 250000.0


def test_the_manifest_says_what_the_weights_do_not(tmp_path):
    convert_checkpoint(ORACLE / "pax_llama_gqa", tmp_path / "te", to="te:rope=half,repeat")
    manifest = read_manifest(tmp_path / "te")
    assert manifest is not None and "rope=half" in manifest.layout and "gate=act_first" in manifest.layout
    assert manifest.model.n_kv_heads == 2 and len(manifest.tensors) == 2 * 7 + 3
    slot = "mdl_vars.params.lm.transformer.repeat.sub.x_layers_0.transformerlayer.cld.mlp.wi_kernel[1]"
    assert manifest.tensors[slot]["shape"] == [16, 2, 24] and len(manifest.tensors[slot]["xxh3"]) == 16
    with open_checkpoint(tmp_path / "te") as checkpoint:  # heads, gate and rope order need not be told again
        assert checkpoint.config.n_heads == 4 and "rope=half" in str(checkpoint.word)
    with pytest.raises(Contradiction, match="n_heads is 2 in the flags, but 4 in the manifest"):
        open_checkpoint(tmp_path / "te", expected={"n_heads": 2})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": "llmtool.manifest/1"}',
        '{"schema": "x/2"}',
        '{"schema": "llmtool.manifest/1", "layout": "te", "model": {"family": 3}}',
    ],
)
def test_a_damaged_manifest_is_an_error_and_not_a_loss_of_facts(text, tmp_path):
    convert_checkpoint(LLAMA, tmp_path / "hf", to="hf")
    (tmp_path / "hf" / NAME).write_text(text)
    with pytest.raises(LlmtoolError, match=NAME):
        open_checkpoint(tmp_path / "hf")


def test_pax_metadata_is_what_paxml_wrote(tmp_path):
    convert_checkpoint(ORACLE / "pax_llama_gqa", tmp_path / "pax", to="pax")
    ours, theirs = (
        json.loads((folder / "checkpoints/checkpoint_00000000/metadata/metadata").read_text())
        for folder in (tmp_path / "pax", ORACLE / "pax_llama_gqa")
    )
    assert ours == theirs
    convert_checkpoint(ORACLE / "pax_gpt_repeat", tmp_path / "gpt", to="pax")
    ours, theirs = (
        json.loads((folder / "checkpoints/checkpoint_00000000/metadata/metadata").read_text())
        for folder in (tmp_path / "gpt", ORACLE / "pax_gpt_repeat")
    )
    assert ours == theirs


def test_native_is_restored_by_orbax(tmp_path):
    import orbax.checkpoint as ocp

    convert_checkpoint(LLAMA, tmp_path / "native", to="native")
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        tree = checkpointer.restore(tmp_path / "native" / "params")
    source = ZarrSource(tmp_path / "native" / "params")

    def leaves(node, prefix=""):
        for name, child in node.items():
            yield from leaves(child, f"{prefix}{name}.") if isinstance(child, dict) else [(prefix + name, child)]

    restored = dict(leaves(tree))
    assert restored.keys() == source.tensors.keys()
    assert all(np.array_equal(np.asarray(restored[key]), source.read(key)) for key in restored)


# shapes, padding, steps


def test_arrays_padded_to_a_mesh_are_cut_to_their_true_shape(tmp_path):
    import tensorstore as ts

    shutil.copytree(ORACLE / "pax_llama_gqa", tmp_path / "pax")
    state = tmp_path / "pax" / "checkpoints" / "checkpoint_00000000" / "state"
    pads = {
        "mdl_vars.params.lm.embedding_lookup.emb_var": (48, 16),
        "mdl_vars.params.lm.softmax.logits_ffn.linear.w": (16, 48),
    }
    for key, shape in pads.items():
        x = ZarrSource(state).read(key)
        padded = np.full(shape, 9.0, np.float32)
        padded[: x.shape[0], : x.shape[1]] = x
        shutil.rmtree(state / key)
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(state / key)},
            "metadata": {"chunks": [shape[0] // 2, shape[1] // 4], "compressor": {"id": "gzip", "level": 1}},
        }
        ts.open(spec, create=True, dtype=ts.float32, shape=shape).result().write(padded).result()
    assert diff_checkpoints(ORACLE / "pax_llama_gqa", tmp_path / "pax").equal
    report = convert_checkpoint(tmp_path / "pax", tmp_path / "hf", to="hf", model_config=sample_config("pax_llama_gqa"))
    assert report.model.vocab_size == 32


def test_steps_are_chosen_listed_and_noted(tmp_path):
    source = ORACLE / "pax_llama_gqa" / "checkpoints" / "checkpoint_00000000"
    for step in (0, 5):
        shutil.copytree(source, tmp_path / "job" / "checkpoints" / f"checkpoint_{step:08d}")
    with pytest.raises(BadCheckpoint, match=r"no step 7; it holds: 0, 5"):
        open_checkpoint(tmp_path / "job", step=7)
    with open_checkpoint(tmp_path / "job") as newest, open_checkpoint(tmp_path / "job", step=0) as first:
        assert newest.step == 5 and first.step == 0
        assert any("took the newest, 5" in note for note in newest.notes)
    with pytest.raises(BadCheckpoint, match="step 5, not the step 7"):
        open_checkpoint(tmp_path / "job" / "checkpoints" / "checkpoint_00000005", step=7)


def test_the_training_step_is_carried(tmp_path):
    shutil.copytree(ORACLE / "pax_llama_gqa", tmp_path / "pax")
    step = tmp_path / "pax" / "checkpoints" / "checkpoint_00000000"
    step.rename(step.with_name("checkpoint_00000007"))
    (step.with_name("checkpoint_00000007") / "state" / "step" / ".zarray").write_text(
        (step.with_name("checkpoint_00000007") / "state" / "step" / ".zarray")
        .read_text()
        .replace('{"id":"zstd","level":1}', "null")
    )
    (step.with_name("checkpoint_00000007") / "state" / "step" / "0").write_bytes((7).to_bytes(4, "little"))
    convert_checkpoint(tmp_path / "pax", tmp_path / "te", to="te")
    convert_checkpoint(tmp_path / "te", tmp_path / "native", to="native")
    convert_checkpoint(tmp_path / "native", tmp_path / "back", to="pax")
    found = find_step(tmp_path / "back", None)
    assert found is not None and found.step == 7 and int(ZarrSource(found.state).read("step")) == 7


def test_flat_and_bare_pax_folders(tmp_path):
    convert_checkpoint(LLAMA, tmp_path / "flat", to="pax:format=flat")
    convert_checkpoint(LLAMA, tmp_path / "bare", to="pax:format=bare")
    assert not (tmp_path / "flat" / "checkpoints" / "checkpoint_00000000" / "metadata").exists()
    assert (tmp_path / "bare" / "step" / ".zarray").is_file()
    with open_checkpoint(tmp_path / "flat") as flat, open_checkpoint(tmp_path / "bare") as bare:
        assert (flat.version, bare.version) == ("0.0", None)
    assert diff_checkpoints(tmp_path / "flat", tmp_path / "bare").equal


# Hugging Face and Meta, as people have them


def test_bin_shards_are_read(tmp_path):
    import torch

    source = hf_copy(tmp_path / "st")
    arrays = {key: torch.from_numpy(x) for key, x in load_file(source / "model.safetensors").items()}
    folder = tmp_path / "bin"
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    names = sorted(arrays)
    halves = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, keys in halves.items():
        torch.save({key: arrays[key] for key in keys}, folder / file)
    index = {"metadata": {}, "weight_map": {key: file for file, keys in halves.items() for key in keys}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert diff_checkpoints(source, folder).equal
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(BadCheckpoint, match=r"pytorch_model-00002-of-00002\.bin"):
        open_checkpoint(folder)


def test_meta_files_load_in_torch_and_in_one_or_many_shards(tmp_path):
    import torch

    for shards in (1, 2):
        convert_checkpoint(LLAMA, tmp_path / str(shards), to=f"meta:shards={shards}")
        files = sorted((tmp_path / str(shards)).glob("*.pth"))
        assert [file.name for file in files] == [f"consolidated.{n:02d}.pth" for n in range(shards)]
        for mapped in (True, False):
            parts = [torch.load(file, weights_only=True, mmap=mapped) for file in files]
            whole = torch.cat([part["layers.1.attention.wo.weight"] for part in parts], 1)
            with open_checkpoint(LLAMA) as checkpoint:
                assert np.array_equal(whole.numpy(), checkpoint.source.read("model.layers.1.self_attn.o_proj.weight"))
    with pytest.raises(PlanError, match=r"shards=3.*does not fit|does not divide into 3"):
        convert_checkpoint(LLAMA, tmp_path / "3", to="meta:shards=3")


def test_a_tied_model_goes_to_meta_with_a_copy_and_comes_back_without(tmp_path):
    source = ORACLE / "hf_llama_mha_tied"
    convert_checkpoint(source, tmp_path / "meta", to="meta")
    convert_checkpoint(tmp_path / "meta", tmp_path / "hf", to="hf")
    assert "lm_head.weight" not in load_file(tmp_path / "hf" / "model.safetensors")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is True
    assert diff_checkpoints(source, tmp_path / "meta").equal
    (tmp_path / "meta" / NAME).unlink()  # without a manifest the copy is taken at its word: an output matrix
    convert_checkpoint(tmp_path / "meta", tmp_path / "untied", to="hf")
    assert diff_checkpoints(source, tmp_path / "untied").equal


def test_a_tied_model_whose_output_differs_is_an_error(tmp_path):
    def change(arrays):
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()

    tied = ORACLE / "hf_llama_mha_tied"
    same = hf_copy(tmp_path / "same", change, tied)
    convert_checkpoint(same, tmp_path / "out", to="pax")

    def spoil(arrays):
        change(arrays)
        arrays["lm_head.weight"][3, 4] += 1

    other = hf_copy(tmp_path / "other", spoil, tied)
    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        convert_checkpoint(other, tmp_path / "out2", to="pax")
    assert not (tmp_path / "out2").exists() and not list(tmp_path.glob(".out2*"))


def test_an_explicit_head_dim_goes_everywhere_but_to_meta(tmp_path):
    rng = np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (32, 16),
        "self_attn.k_proj": (16, 16),
        "self_attn.v_proj": (16, 16),
        "self_attn.o_proj": (16, 32),
    }

    def change(arrays):
        for layer in range(2):
            for name, shape in shapes.items():
                arrays[f"model.layers.{layer}.{name}.weight"] = rng.standard_normal(shape).astype(np.float32)

    source = hf_copy(tmp_path / "hf", change, head_dim=8)
    for to in ("pax", "te", "native"):
        convert_checkpoint(source, tmp_path / to, to=to)
        convert_checkpoint(tmp_path / to, tmp_path / f"{to} back", to="hf")
        assert diff_checkpoints(source, tmp_path / f"{to} back").equal
    with pytest.raises(PlanError, match="head_dim"):
        convert_checkpoint(source, tmp_path / "meta", to="meta")


@pytest.mark.parametrize(("key", "found", "expected"), [
    ("model.layers.1.mlp.up_proj.weight", None, "missing array model.layers.1.mlp.up_proj.weight"),
    ("model.layers.1.mlp.up_proj.weight", (24, 17), r"has shape \[24, 17\].*\[24, 16\]"),
    ("model.layers.7.mlp.up_proj.weight", (24, 16), "unknown array model.layers.7.mlp.up_proj.weight"),
    ("model.norm.weight", "int8", "holds int8, not floating-point"),
])  # fmt: skip
def test_arrays_that_do_not_fit_are_named_before_anything_is_written(key, found, expected, tmp_path):
    def change(arrays):
        arrays.pop(key, None)
        if isinstance(found, tuple):
            arrays[key] = np.zeros(found, np.float32)
        elif found:
            arrays[key] = np.zeros(16, found)

    source = hf_copy(tmp_path / "hf", change)
    with pytest.raises(PlanError, match=expected):
        convert_checkpoint(source, tmp_path / "out", to="pax")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_every_problem_is_told_at_once(tmp_path):
    def change(arrays):
        del arrays["model.layers.0.mlp.up_proj.weight"]
        arrays["stranger"] = np.zeros(3, np.float32)

    source = hf_copy(tmp_path / "hf", change)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    with pytest.raises(PlanError) as caught:
        convert_checkpoint(source, tmp_path / "full", to="meta:shards=2", dry_run=True, overwrite=True)
    assert len(caught.value.problems) == 3
    assert (
        "stranger" in str(caught.value)
        and "up_proj" in str(caught.value)
        and "holds no checkpoint" in str(caught.value)
    )


def test_informationless_buffers_of_old_files_are_ignored(tmp_path):
    def change(arrays):
        arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)

    assert diff_checkpoints(hf_copy(tmp_path / "hf", change), LLAMA).equal

    def gpt(arrays):
        for key in list(arrays):
            arrays[key.removeprefix("transformer.")] = arrays.pop(key)
        arrays["h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.float32)
        arrays["h.1.attn.masked_bias"] = np.array(-1e4, np.float32)

    assert diff_checkpoints(hf_copy(tmp_path / "old gpt2", gpt, GPT), GPT).equal


# the target


def test_a_dry_run_writes_nothing_and_tells_the_plan(tmp_path):
    report = convert_checkpoint(LLAMA, tmp_path / "out", to="te", dry_run=True)
    assert report.dry_run and not list(tmp_path.iterdir())
    packed = next(line for line in report.plan if "layers.0.self_attn.k_proj" in line)
    assert "v_proj" in packed and packed.endswith("transformerlayer.cld.attention.kv.kernel")


def test_a_full_folder_is_kept_unless_told_and_never_if_it_is_no_checkpoint(tmp_path):
    convert_checkpoint(LLAMA, tmp_path / "out", to="hf")
    with pytest.raises(BadTarget, match="--overwrite"):
        convert_checkpoint(LLAMA, tmp_path / "out", to="meta")
    convert_checkpoint(LLAMA, tmp_path / "out", to="meta", overwrite=True)
    assert not (tmp_path / "out" / "config.json").exists() and (tmp_path / "out" / "params.json").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("three years")
    (tmp_path / "home" / "config.json").write_text("{}")  # a name that is not a checkpoint's alone
    with pytest.raises(BadTarget, match="no checkpoint"):
        convert_checkpoint(LLAMA, tmp_path / "home", to="hf", overwrite=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "three years"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out"]


def test_source_and_target_may_not_touch(tmp_path):
    source = hf_copy(tmp_path / "hf")
    for target in (source, source / "inside", tmp_path):
        with pytest.raises(LlmtoolError, match="one folder or lie in each other"):
            convert_checkpoint(source, target, to="meta", overwrite=True)
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(LlmtoolError, match="one folder"):
        convert_checkpoint(source, tmp_path / "link", to="meta", overwrite=True)
    assert diff_checkpoints(source, LLAMA).equal


def test_a_run_that_fails_leaves_the_old_output_and_no_rubbish(tmp_path, monkeypatch):
    convert_checkpoint(LLAMA, tmp_path / "out", to="hf")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def fail(slot, nbytes):
        if "layers.1" in slot:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        convert_checkpoint(LLAMA, tmp_path / "out", to="meta", overwrite=True, progress=fail)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_too_little_disk_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(BadTarget, match="10 bytes free; the output needs"):
        convert_checkpoint(LLAMA, tmp_path / "out", to="hf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_place_is_told(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(BadTarget, match="can be written"):
        convert_checkpoint(LLAMA, tmp_path / "out", to="hf")


def test_odd_paths_are_paths(tmp_path):
    folder = tmp_path / "mit Leerzeichen und Ümläut 模型"
    convert_checkpoint(LLAMA, folder / "a b", to="pax")
    assert diff_checkpoints(LLAMA, folder / "a b").equal


# opening


def test_what_is_not_there_or_not_a_checkpoint(tmp_path):
    with pytest.raises(BadCheckpoint, match="no such file"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(UnknownLayout, match="it holds: nothing"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UnknownLayout, match=r"notes\.txt.*Expected config\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(UnknownLayout, match="looks like hf"):
        open_checkpoint(LLAMA, layout="meta")
    with pytest.raises(UnknownLayout, match="holds pax layers, but --from says te"):
        open_checkpoint(ORACLE / "pax_gpt", layout="te")
    with pytest.raises(Contradiction, match=r"qkv is combined.*qkv=split"):
        open_checkpoint(ORACLE / "pax_gpt", layout="pax:qkv=split")
    with pytest.raises(UnknownLayout, match="read only"):
        convert_checkpoint(LLAMA, tmp_path / "x", to="gguf")
    with pytest.raises(UnknownLayout, match="--step is for Pax"):
        open_checkpoint(LLAMA, step=3)


def test_a_model_config_may_add_and_may_not_contradict(tmp_path):
    config = sample_config("pax_llama_gqa")
    with pytest.raises(Contradiction, match=r"d_ff is 24 .* but 48"):
        open_checkpoint(ORACLE / "pax_llama_gqa", model_config=dataclasses.replace(config, d_ff=48))
    with pytest.raises(Contradiction, match="tied is False"):
        open_checkpoint(ORACLE / "pax_llama_gqa", model_config=dataclasses.replace(config, tied=True))
    hf_copy(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").unlink()
    with pytest.raises(MissingFact, match=r"no config\.json.*--model-config"):
        open_checkpoint(tmp_path / "hf")
    with open_checkpoint(tmp_path / "hf", model_config=config) as checkpoint:
        assert checkpoint.config == config
    assert diff_checkpoints(tmp_path / "hf", LLAMA, model_config=str(LLAMA / "config.json")).equal


def test_inspect_tells_what_is_odd_from_headers_alone(tmp_path):
    source = hf_copy(tmp_path / "hf", lambda arrays: arrays.pop("model.norm.weight"))
    with open_checkpoint(source) as checkpoint:
        told = checkpoint.describe()
    assert told["layout"] == "hf" and told["family"] == "llama" and told["dtypes"] == {"float32": 20}
    assert "missing array model.norm.weight: expected shape [16]" in told["odd"]
    with open_checkpoint(ORACLE / "pax_llama_gqa") as checkpoint:
        told = checkpoint.describe()
    assert told["missing_facts"] == ["norm_eps", "rope_theta"] and told["left_out"]["optimizer moments"] == 42
    assert told["parameters"] == 4944 and told["bytes"] == 4 * 4944


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["file", "pipe", "link to nothing", "link to a folder"])
def test_what_is_no_folder_is_never_replaced(kind, overwrite, tmp_path):
    """A device such as /dev/null is of this kind: renaming a folder over it would break the machine."""
    target = tmp_path / "target"
    match kind:
        case "file":
            target.write_text("mine")
        case "pipe":
            os.mkfifo(target)
        case "link to nothing":
            target.symlink_to(tmp_path / "nowhere")
        case _:
            (tmp_path / "folder").mkdir()
            target.symlink_to(tmp_path / "folder")
    before = target.lstat()
    with pytest.raises(BadTarget, match="expected a folder or nothing"):
        convert_checkpoint(LLAMA, target, to="hf", overwrite=overwrite)
    assert target.lstat().st_ino == before.st_ino and not list(tmp_path.glob(".target*"))


def test_a_few_facts_alone_complete_a_checkpoint(tmp_path):
    facts = tmp_path / "facts.json"
    facts.write_text('{"norm_eps": 1e-5, "rope_theta": 10000.0}')
    report = convert_checkpoint(ORACLE / "pax_llama_gqa", tmp_path / "hf", to="hf", model_config=str(facts))
    assert report.model == sample_config("pax_llama_gqa")
    facts.write_text('{"norm_eps": "small"}')
    with pytest.raises(BadCheckpoint, match=r"facts\.json: norm_eps is 'small'; expected"):
        open_checkpoint(ORACLE / "pax_llama_gqa", model_config=str(facts))
    facts.write_text('{"norm_eps": 1e-5, "epsilon": 1}')
    with pytest.raises(LlmtoolError, match=r"facts\.json"):
        open_checkpoint(ORACLE / "pax_llama_gqa", model_config=str(facts))
    facts.write_text('{"schema": "llmtool.model/1", "d_ff": 25}')
    with pytest.raises(Contradiction, match=r"d_ff is 24 .* but 25"):
        open_checkpoint(ORACLE / "pax_llama_gqa", model_config=str(facts))


def test_a_step_of_our_own_checkpoint_finds_the_manifest_of_the_job(tmp_path):
    convert_checkpoint(ORACLE / "pax_llama_gqa", tmp_path / "job", to="pax:rope=half")
    step = tmp_path / "job" / "checkpoints" / "checkpoint_00000000"
    for path in (tmp_path / "job", step.parent, step, step / "state"):
        with open_checkpoint(path) as checkpoint:
            assert "rope=half" in str(checkpoint.word) and not checkpoint.remarks, path


def test_diff_takes_the_steps_it_is_told_and_says_which_it_took(tmp_path):
    step = ORACLE / "pax_llama_gqa" / "checkpoints" / "checkpoint_00000000"
    other = ORACLE / "pax_llama_gqa_weightsonly" / "checkpoints" / "checkpoint_00000000"
    shutil.copytree(step, tmp_path / "job" / "checkpoints" / "checkpoint_00000000")
    shutil.copytree(other, tmp_path / "job" / "checkpoints" / "checkpoint_00000005")
    newest = diff_checkpoints(tmp_path / "job", other)
    assert newest.equal and any("took the newest, 5" in note for note in newest.notes)
    first = diff_checkpoints(tmp_path / "job", step, step_a=0)
    assert first.equal and not first.notes


def test_a_file_may_be_converted_into_a_folder_beside_it(tmp_path, monkeypatch):
    hf_copy(tmp_path / "hf")
    monkeypatch.chdir(tmp_path / "hf")
    convert_checkpoint("model.safetensors", "out", to="meta")
    assert diff_checkpoints(LLAMA, "out").equal


def test_a_default_gives_way_to_what_the_user_says(tmp_path):
    """A config without rope_theta does not say 10000: a told value completes it, and one that it says still wins."""
    silent = hf_copy(tmp_path / "silent", rope_parameters=..., rope_theta=...)
    with open_checkpoint(silent) as checkpoint:
        assert checkpoint.config.rope_theta == 10000 and "rope_theta" in str(checkpoint.remarks)
    told = dataclasses.replace(checkpoint.config, rope_theta=500000.0)
    with open_checkpoint(silent, model_config=told) as checkpoint:
        assert checkpoint.config.rope_theta == 500000
    with pytest.raises(Contradiction, match="rope_theta"):
        open_checkpoint(LLAMA, model_config=told)
    meta = ORACLE / "meta_llama2_gqa_mp1"
    with open_checkpoint(meta) as checkpoint:
        told = dataclasses.replace(checkpoint.config, rope_theta=1e6)
    with open_checkpoint(meta, model_config=told) as checkpoint:
        assert checkpoint.config.rope_theta == 1e6
