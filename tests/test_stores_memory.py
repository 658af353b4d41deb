"""What reading and writing large arrays costs in memory that belongs to the process alone."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmtool.convert.stores.base import Sink, Source, TensorSpec
from llmtool.convert.stores.pickled import MetaSink, MetaSource, TorchSource
from llmtool.convert.stores.safetensors import SafetensorsSink, SafetensorsSource
from llmtool.convert.stores.zarr import ZarrSink, ZarrSource

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measured through /proc")
LAYERS, ROWS, COLUMNS = 32, 1024, 1024
SPEC = TensorSpec(np.dtype(np.float32), (LAYERS, ROWS, COLUMNS))  # 128 MiB
LAYER = ROWS * COLUMNS * 4
SLACK = 10 << 20


def anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Peak:
    """The most anonymous memory at any ``look`` since the beginning, less what was there then."""

    def __init__(self) -> None:
        self.start, self.most = anonymous(), 0

    def look(self) -> None:
        self.most = max(self.most, anonymous() - self.start)


def layers(sink: Sink, peak: Peak) -> None:
    for layer in range(LAYERS):
        sink.write("a", (layer,), np.full(SPEC.shape[1:], layer, np.float32))
        peak.look()
    sink.close()
    peak.look()


SINKS: dict[str, Callable[[Path], Sink]] = {
    "safetensors": lambda folder: SafetensorsSink(folder, {"a": SPEC}, 1 << 30),
    "one chunk": lambda folder: ZarrSink(folder, {"a": SPEC}),
    "chunk a layer": lambda folder: ZarrSink(folder, {"a": SPEC}, {"a": (1, ROWS, COLUMNS)}),
    "mesh": lambda folder: ZarrSink(folder, {"a": SPEC}, {"a": (LAYERS, ROWS // 2, COLUMNS // 2)}),
    "packed": lambda folder: ZarrSink(folder, {"a": SPEC}, compressor="zstd"),
}


@pytest.mark.parametrize("name", SINKS)
def test_a_stacked_array_is_written_and_read_layer_by_layer(tmp_path: Path, name: str) -> None:
    peak = Peak()
    layers(SINKS[name](tmp_path), peak)
    assert peak.most < 2 * LAYER + SLACK
    peak = Peak()
    source: Source = SafetensorsSource(tmp_path) if name == "safetensors" else ZarrSource(tmp_path)
    for layer in range(LAYERS):
        x = source.read("a", (layer,))
        assert x.min() == x.max() == layer
        peak.look()
    assert peak.most < (2 * LAYER if name in ("mesh", "packed") else 0) + SLACK
    source.close()


def test_a_packed_chunk_of_all_layers_goes_through_the_disk(tmp_path: Path) -> None:
    sink = ZarrSink(tmp_path, {"a": SPEC}, {"a": SPEC.shape}, "zstd")
    for layer in range(LAYERS):
        sink.write("a", (), np.full((1, *SPEC.shape[1:]), layer, np.float32), layer)
    sink.close()
    peak = Peak()
    source = ZarrSource(tmp_path, scratch=tmp_path)
    for layer in range(LAYERS):
        assert source.read("a", (layer,))[0, 0] == layer
        peak.look()
    assert peak.most < SLACK
    assert sum(os.stat(tmp_path / "a" / name).st_size for name in os.listdir(tmp_path / "a")) < 1 << 20


def test_torch_files_are_mapped(tmp_path: Path) -> None:
    spec = TensorSpec(SPEC.dtype, (LAYERS * ROWS, COLUMNS))
    peak = Peak()
    sink = MetaSink(tmp_path, {"a": spec}, 2, lambda key, shapes: 0)
    for row in range(0, LAYERS * ROWS, ROWS):
        sink.write("a", (), np.full((ROWS, COLUMNS), row, np.float32), row)
        peak.look()
    sink.close()
    assert peak.most < 2 * LAYER + SLACK
    peak = Peak()
    source = TorchSource([tmp_path / "consolidated.01.pth"])
    assert source.read("a")[-1, 0] == ROWS * (LAYERS - 1)
    assert float(source.read("a").sum(dtype=np.float64)) > 0
    peak.look()
    assert peak.most < SLACK
    whole = MetaSource(tmp_path, lambda key, shapes: 0)
    assert whole.read("a", (LAYERS * ROWS - 1,))[0] == ROWS * (LAYERS - 1)
    peak.look()
    assert peak.most < SLACK


def test_hostile_headers_cost_nothing(tmp_path: Path) -> None:
    from llmtool.errors import BadCheckpoint

    peak = Peak()
    for head in (b"\xff" * 8, (1 << 40).to_bytes(8, "little"), (99 << 20).to_bytes(8, "little")):
        (tmp_path / "a.safetensors").write_bytes(head + b"{}")
        with pytest.raises(BadCheckpoint):
            SafetensorsSource(tmp_path)
        peak.look()
    for code in (b"\x80\x05\x96\0\0\0\0\0\1\0\0", b"\x80\x02}r\xff\xff\xff\x7f", b"\x80\x02X\xff\xff\xff\x7f"):
        (tmp_path / "a.pth").write_bytes(code + b".")
        with pytest.raises(BadCheckpoint):
            TorchSource([tmp_path / "a.pth"])
        peak.look()
    assert peak.most < SLACK
