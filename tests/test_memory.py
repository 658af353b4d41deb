"""Memory does not follow the model: anonymous resident memory of a conversion is flat from 2 to 32 layers."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmtool.convert.converting import convert_checkpoint
from llmtool.convert.layouts import hf
from llmtool.convert.row import StoredShapes
from llmtool.convert.sidecars.hf_config import config_to_hf
from llmtool.convert.stores.base import DTYPES, TensorSpec
from llmtool.convert.stores.safetensors import SafetensorsSink
from llmtool.model_config import ModelConfig
from llmtool.params import sizes

D, F = 384, 1280
MEASURE = """
import sys, threading, time
from llmtool.convert import convert_checkpoint
from llmtool.convert import converting, openers  # noqa: the imports are not counted
from llmtool.convert.openers import gguf, hf, meta, native, pax
import tensorstore, zstandard

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)

before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
convert_checkpoint(sys.argv[1], sys.argv[2], to=sys.argv[3])
done = True
thread.join()
print(peak - before)
"""


def write_llama(folder: Path, layers: int) -> ModelConfig:
    """A bf16 LLaMA of random bits, as Hugging Face keeps it."""
    config = ModelConfig(
        "llama",
        vocab_size=1000,
        d_model=D,
        n_layers=layers,
        n_heads=6,
        n_kv_heads=2,
        head_dim=64,
        d_ff=F,
        norm="rmsnorm",
        gated=True,
        position="rope",
        tied=False,
        norm_eps=1e-5,
        rope_theta=1e4,
        activation="silu",
        max_positions=64,
    )
    folder.mkdir()
    bf16 = DTYPES["bfloat16"]
    bounds = [bound for bound in hf.table(config).bind(config)]
    specs = {key: TensorSpec(bf16, shape) for key, shape in StoredShapes.of(bounds, sizes(config)).shapes.items()}
    sink = SafetensorsSink(folder, specs, 20_000_000)
    rng = np.random.default_rng(layers)
    for key, spec in specs.items():
        sink.write(key, (), rng.standard_normal(spec.shape, np.float32).astype(bf16))
    sink.close()
    (folder / "config.json").write_text(json.dumps(config_to_hf(config, "bfloat16")))
    return config


def peak_kilobytes(source: Path, target: Path, to: str) -> int:
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, source, target, to], capture_output=True, text=True, check=True
    )
    return int(out.stdout)


@pytest.mark.parametrize("to", ["hf", "meta:shards=2", "pax:repeat", "te:repeat", "native"])
def test_memory_is_flat_in_depth(to, tmp_path):
    peaks = {}
    for layers in (2, 32):
        source, there = tmp_path / f"source{layers}", tmp_path / f"there{layers}"
        write_llama(source, layers)
        peaks[layers] = peak_kilobytes(source, there, to)
        back = peak_kilobytes(there, tmp_path / f"back{layers}", "hf" if to != "hf" else "pax:repeat")
        peaks[layers] = max(peaks[layers], back)
    model = 32 * (2 * D * D + 2 * D * D // 3 + 3 * D * F) * 2 // 1024  # kilobytes of the deep model: 130 MB
    largest_slice = D * F * 2 // 1024
    assert model > 100_000
    assert peaks[32] < 4 * largest_slice + 256 * 1024
    assert peaks[32] - peaks[2] < 40_000, peaks


def test_a_compressed_stack_is_unpacked_once_and_not_in_memory(tmp_path):
    """Foreign Pax folders hold all layers in one zstd chunk: it goes to a temporary file, not into memory."""
    import tensorstore as ts

    peaks = {}
    for layers in (2, 32):
        write_llama(tmp_path / f"hf{layers}", layers)
        convert_checkpoint(tmp_path / f"hf{layers}", tmp_path / f"pax{layers}", to="pax:repeat")
        state = tmp_path / f"pax{layers}" / "checkpoints" / "checkpoint_00000000" / "state"
        for folder in state.glob("mdl_vars*"):
            kvstore = {"driver": "file", "path": str(folder)}
            x = ts.open({"driver": "zarr", "kvstore": kvstore}).result().read().result()
            metadata = {"chunks": x.shape, "compressor": {"id": "zstd", "level": 1}}
            spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata}
            ts.open(spec, create=True, delete_existing=True, dtype=ts.bfloat16, shape=x.shape).result().write(
                x
            ).result()
        peaks[layers] = peak_kilobytes(tmp_path / f"pax{layers}", tmp_path / f"back{layers}", "hf")
    assert peaks[32] - peaks[2] < 40_000, peaks
