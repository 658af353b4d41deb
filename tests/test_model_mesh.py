"""The same numbers on every mesh, weights split as the table says, and every byte read once by whoever needs it."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from llmtool import native_tree, params
from llmtool.errors import Contradiction
from llmtool.model.decoder import Decoder
from llmtool.model.load import load_params
from llmtool.model.mesh import make_mesh, parse_mesh
from llmtool.model.part import Compute
from llmtool.model.sharding import spec, weight_shardings
from llmtool.model.tree import flatten
from llmtool.model_config import ModelConfig

SIZES = {"vocab_size": 64, "d_model": 24, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "head_dim": 6, "d_ff": 40}
LLAMA = ModelConfig("llama", **SIZES, norm="rmsnorm", gated=True, position="rope", tied=False, norm_eps=1e-5,
                    activation="silu", rope_theta=1e4)
GPT = ModelConfig("gpt", **SIZES | {"n_kv_heads": 8}, norm="layernorm", gated=False, position="learned", tied=True,
                  norm_eps=1e-5, activation="gelu_tanh", max_positions=16, qkv_bias=True, attn_out_bias=True,
                  mlp_bias=True)
GLAM = ModelConfig("glam", **SIZES | {"n_kv_heads": 8}, norm="rmsnorm", gated=True, position="t5", tied=True,
                   norm_eps=1e-6, activation="gelu_tanh", n_experts=4, experts_per_token=2, expert_d_ff=20,
                   expert_activation="relu", block_period=2, moe_layers_in_block=(0,), relative_buckets=8,
                   relative_max_distance=12, extra_softmax_logit=True, scale_logits=True)
MODELS = {"llama": (LLAMA, None), "gpt": (GPT, None), "glam": (GLAM, None), "glam_capacity": (GLAM, 1.0)}
MESHES = ["data=8", "data=2,fsdp=2,tensor=2", "fsdp=4,tensor=2"]


class Drawn:
    """Weights drawn from their names, and a count of the bytes that were asked for."""

    def __init__(self, config: ModelConfig):
        self.templates = {w.name: w.template for w in params.weights(config)}
        self.sizes = params.sizes(config)

    def weight(self, name: str) -> np.ndarray:
        """One weight; rotated ones spelt out in halves and pairs, as conversion's views are."""
        template = self.templates[name]
        shape = [self.sizes[axis] for axis in params.TABLE[template].split()]
        x = 0.3 * np.random.default_rng([*name.encode()]).standard_normal(shape, np.float32)
        return x.reshape(*shape[:-1], 2, -1) if template in params.ROTATED else x


def _total(config: ModelConfig) -> int:
    return sum(4 * int(np.prod(entry.shape)) for entry in native_tree.entries(config).values())


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> SimpleNamespace:
    config, factor = MODELS[request.param]
    ids = np.random.default_rng(0).integers(0, 64, (8, 12))
    tree = load_params(Drawn(config), config)
    logits = jax.jit(Decoder(config, Compute(capacity_factor=factor)).apply)({"params": tree}, ids)
    return SimpleNamespace(config=config, factor=factor, ids=ids, tree=tree, logits=np.asarray(logits))


@pytest.mark.parametrize("shape", MESHES)
def test_logits_do_not_depend_on_the_mesh(model: SimpleNamespace, shape: str) -> None:
    mesh, read = make_mesh(shape), []
    tree = load_params(Drawn(model.config), model.config, mesh, on_read=read.append)
    assert sum(read) == _total(model.config)
    shardings = weight_shardings(model.config, mesh)
    for key, x in flatten(tree).items():
        assert x.sharding == shardings[key]
        np.testing.assert_array_equal(x, flatten(model.tree)[key])
    decoder = Decoder(model.config, Compute(mesh=mesh, capacity_factor=model.factor))
    logits = jax.jit(decoder.apply)({"params": tree}, model.ids)
    np.testing.assert_allclose(logits, model.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_do_not_divide_over_the_mesh_still_run(model: SimpleNamespace, rows: int) -> None:
    if model.factor is not None:
        return  # with a capacity the batch decides what is dropped
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    tree = load_params(Drawn(model.config), model.config, mesh)
    logits = jax.jit(Decoder(model.config, Compute(mesh=mesh)).apply)({"params": tree}, model.ids[:rows])
    np.testing.assert_allclose(logits, model.logits[:rows], atol=1e-4, rtol=0)


def test_heads_are_split_by_kv_head_or_else_by_query_and_experts_leave_the_model_axis_whole() -> None:
    mesh = make_mesh("fsdp=2,tensor=4")
    assert spec(("L", "D", "K", "G", "H"), (4, 24, 4, 2, 6), mesh) == P(None, ("fsdp",), ("tensor",), None, None)
    assert spec(("L", "D", "K", "G", "H"), (4, 24, 2, 4, 6), mesh) == P(None, ("fsdp",), None, ("tensor",), None)
    assert spec(("L", "D", "K", "H"), (4, 24, 2, 6), mesh) == P(None, ("fsdp",), None, None)
    assert spec(("L", "E", "D", "X"), (2, 4, 24, 20), mesh) == P(None, ("fsdp",), None, ("tensor",))
    assert spec(("L", "E", "D", "X"), (2, 3, 24, 20), mesh) == P(None, None, ("fsdp",), ("tensor",))
    assert spec(("V", "D"), (65, 23), mesh) == P(None, None)


def test_large_weights_are_held_in_parts() -> None:
    mesh = make_mesh("fsdp=4,tensor=2")
    for key, x in flatten(load_params(Drawn(LLAMA), LLAMA, mesh)).items():
        parts = x.size // x.addressable_shards[0].data.size
        assert parts == (1 if "norm" in key else 8), key


@pytest.mark.parametrize(("text", "shape"), [
    ("", {"data": 1, "fsdp": 1, "tensor": 1}),
    ("tensor=4, data=2", {"data": 2, "fsdp": 1, "tensor": 4}),
])
def test_mesh_words(text: str, shape: dict[str, int]) -> None:
    assert parse_mesh(text) == shape


@pytest.mark.parametrize("text", ["model=2", "data", "data=0", "data=-1", "data=x", "data=2.0", "=2"])
def test_a_mesh_word_that_is_none_names_the_axes(text: str) -> None:
    with pytest.raises(Contradiction, match="data, fsdp, tensor"):
        parse_mesh(text)


@pytest.mark.parametrize(("text", "proposed"), [
    ("data=2,fsdp=2,tensor=4", "data=2,fsdp=1,tensor=4"),
    ("data=3", "data=1,fsdp=8,tensor=1"),
    ("tensor=16", "data=1,fsdp=1,tensor=8"),
])
def test_a_mesh_that_does_not_fit_proposes_one_that_does(text: str, proposed: str) -> None:
    with pytest.raises(Contradiction, match=f"there are 8; {proposed} would fit"):
        make_mesh(text)
    assert make_mesh(proposed).size == 8


_PROCESS = """
import json, sys
import jax, numpy as np
port, index, folder = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index), initialization_timeout=60)
sys.path.insert(0, folder)
from test_model_mesh import LLAMA, Drawn
from llmtool.model.decoder import Decoder
from llmtool.model.load import load_params
from llmtool.model.mesh import make_mesh
from llmtool.model.part import Compute
from llmtool.model.tree import flatten
mesh, read = make_mesh("fsdp=4"), []
tree = load_params(Drawn(LLAMA), LLAMA, mesh, on_read=read.append)
whole = sum(x.nbytes for x in flatten(tree).values() if x.is_fully_replicated)
ids = np.random.default_rng(0).integers(0, 64, (8, 12))
model = Decoder(LLAMA, Compute(mesh=mesh))
loss = jax.jit(lambda p: jax.numpy.sum(model.apply({"params": p}, ids) ** 2))(tree)
print(json.dumps({"read": sum(read), "whole": whole, "loss": float(loss)}))
"""


@pytest.mark.slow
def test_each_of_two_processes_reads_its_share_once(root: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    argv = [sys.executable, "-c", _PROCESS, port]
    environment: dict[str, Any] = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root), "PATH": ""}
    runs = [subprocess.Popen([*argv, str(i), str(root / "tests")], env=environment, stdout=subprocess.PIPE, text=True)
            for i in range(2)]
    reports = [json.loads(run.communicate(timeout=180)[0].splitlines()[-1]) for run in runs]
    ids = np.random.default_rng(0).integers(0, 64, (8, 12))
    logits = Decoder(LLAMA).apply({"params": load_params(Drawn(LLAMA), LLAMA)}, ids)
    for report in reports:
        split = _total(LLAMA) - report["whole"]
        assert report["read"] == split // 2 + report["whole"]
        assert report["loss"] == pytest.approx(float(jnp.sum(logits**2)), rel=1e-5)
