"""Real checkpoints and real configs; skipped where the reference material is absent."""

import json
import shutil

import numpy as np
import pytest

from llmtool import presets
from llmtool.convert import convert_checkpoint, diff_checkpoints, open_checkpoint
from llmtool.convert.stores.safetensors import SafetensorsSource
from llmtool.errors import BadCheckpoint, LlmtoolError

pytestmark = pytest.mark.shared
READ = {  # parameters of each real config
    "gpt2-large": 774_030_080,
    "llama2-7b-chat": 6_738_415_616,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b-per-tensor-shards": 3_212_749_824,
    "mistral-7b-v0.3": 7_248_023_552,
    "tinyllama-1.1b-chat": 1_100_048_384,
    "wizardlm2-8x22b-mixtral": 140_620_634_112,
}
REFUSED = {
    "falcon-180b": "falcon",
    "llama2-13b-4bit": "quantised",
    "llama3.1-8b-bnb": "quantised",
    "pythia-1.4b-rm": "reward model",
    "qwen-72b": "qwen",
}


@pytest.mark.parametrize("name", [*READ, *REFUSED])
def test_real_configs_are_read_or_refused_with_the_reason(name, shared):
    folder = shared / "data" / "configs" / name
    if name in REFUSED:
        with pytest.raises(LlmtoolError, match=REFUSED[name]):
            open_checkpoint(folder)
        return
    with open_checkpoint(folder) as checkpoint:
        told = checkpoint.describe()
    assert told["parameters"] == READ[name] == presets.parameter_count(checkpoint.known_config())
    assert not [line for line in told["odd"] if "unknown" in line or "missing array" in line]
    assert any("the weights are not here" in line for line in told["odd"])


def test_there_is_a_case_for_every_real_config(shared):
    names = {path.name for path in (shared / "data" / "configs").iterdir() if path.is_dir()}
    assert names == READ.keys() | REFUSED.keys()


def test_real_params_files_are_read_or_say_what_they_lack(shared):
    sizes = {}
    for folder in sorted(path for path in (shared / "data" / "meta_params").iterdir() if path.is_dir()):
        data = json.loads((folder / "params.json").read_text())
        if data["vocab_size"] == -1:
            with pytest.raises(LlmtoolError, match="vocab_size"):
                open_checkpoint(folder)
            preset = folder.name.lower().replace("llama-", "llama")
            with open_checkpoint(folder, model_config=preset) as checkpoint:
                sizes[folder.name] = checkpoint.describe()["parameters"]
        else:
            with open_checkpoint(folder) as checkpoint:
                sizes[folder.name] = checkpoint.describe()["parameters"]
    assert len(sizes) == 9
    assert sizes["llama-2-70b"] == 68_976_648_192 and sizes["Meta-Llama-3-8B"] == 8_030_261_248
    assert sizes["llama-1-65B"] == 65_285_660_672 and sizes["llama-2-13b"] == 13_015_864_320


@pytest.mark.parametrize("name", ["llama-2-13b", "mistral-7b-v0.3"])
def test_pointers_instead_of_weights_are_told(name, shared):
    folder = shared / "data" / "lfs_pointers" / name
    with pytest.raises(BadCheckpoint, match="git lfs pull"):
        open_checkpoint(folder, model_config="llama2-13b" if "llama" in name else None)


def test_stories260k_through_every_layout(shared, tmp_path):
    """A trained model: from transformers' form and from Meta's, through all layouts, to transformers' own logits."""
    import torch
    from transformers import AutoModelForCausalLM

    source = shared / "data" / "stories260K"
    assert diff_checkpoints(source / "hf", source / "hf_meta").equal
    before = source / "hf_meta"
    for number, to in enumerate(("pax:repeat", "te:qkv=separate", "native", "meta:shards=2", "pax:rope=half", "hf")):
        after = tmp_path / str(number)
        convert_checkpoint(before, after, to=to, model_config=str(source / "hf" / "config.json"))
        assert diff_checkpoints(source / "hf", after).equal, to
        before = after
    torch.set_num_threads(1)
    golden = np.load(shared / "golden" / "hf_forward" / "stories260K.npz")
    ids = torch.from_numpy(golden["ids"]).long()
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
            for folder in (before, source / "hf")
        )
    assert torch.equal(ours, theirs)
    np.testing.assert_allclose(ours[:, golden["positions"]], golden["logits_at_positions"], atol=1e-4, rtol=0)


def test_real_single_tensor_shards_without_an_index(shared, tmp_path):
    folder = tmp_path / "shards"
    shutil.copytree(shared / "data" / "safetensors_real", folder)
    source = SafetensorsSource(folder)
    assert len(source.tensors) == 4 and all(
        np.isfinite(source.read(key).astype(np.float32)).all() for key in source.tensors
    )
