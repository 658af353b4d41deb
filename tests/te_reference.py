"""The forward pass of TE-in-Pax folders through Transformer Engine's own flax modules, on a CPU.

    python tests/te_reference.py --config CONFIG.json STATE IDS.npy OUT.npy [STATE IDS.npy OUT.npy ...]

STATE is a ``state/`` folder of zarr arrays with Pax names, IDS int tokens [B, T], OUT the float32 logits [B, T, V].
CONFIG holds what such a folder does not say: ``n_heads``, ``norm_eps``, ``rope_theta`` and, for a gated
feed-forward, the ``activations`` in the order in which Transformer Engine is told of them.

Every transformer layer runs the flax code of the ``transformer-engine`` wheel, with its kernels switched off; only
the embedding, the last norm and the output matrix, which belong to Pax, are written out here. The wheel is pure Python
and refuses to be imported without its CUDA libraries, so their two modules are replaced before the import: run this
file in a process of its own. The wheel is looked for in ``$LLMTOOL_TE_WHEEL``, then in ``te-wheel`` at the root of
the environment (``pip install --no-deps --target DIR transformer-engine``), then among the installed packages; not
the best place, because ``import peft`` imports whatever carries that name, and fails.
"""

import argparse
import importlib.machinery
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

LAYER = re.compile(r"transformer\.(repeat\.sub\.)?x_layers_(\d+)\.transformerlayer\.cld\.(.+)")
LM = "mdl_vars.params.lm."


def wheel() -> Path | None:
    """The folder that holds the wheel's ``transformer_engine`` package, found without importing it."""
    places = [os.environ.get("LLMTOOL_TE_WHEEL") or f"{sys.prefix}/te-wheel", *sys.path]
    return next((Path(p) for p in places if Path(p, "transformer_engine", "jax", "flax", "module.py").is_file()), None)


class _Enum(type):
    """Stands in for an enumeration of the compiled extension: any name is a member, an int of its own."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = type(name, (int,), {"name": name, "value": property(int)})(len(cls.__dict__))
        setattr(cls, name, member)
        return member

    def __call__(cls, *args: Any) -> Any:
        return args[0] if args else None


class _Extension(types.ModuleType):
    """Stands in for the compiled ``transformer_engine_jax``: enumerations, versions, and no kernel at all."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = _Enum(name, (), {})
        if name[0].islower():
            def value(*_: Any, **__: Any) -> Any:
                return {} if name == "registrations" else 0
        setattr(self, name, value)
        return value


def import_transformer_layer() -> Any:
    """``TransformerLayer`` and ``TransformerLayerType`` of the wheel's flax modules."""
    root = wheel()
    if root is None:
        raise SystemExit("no transformer-engine wheel: pip install --no-deps --target DIR transformer-engine")
    os.environ.update(JAX_PLATFORMS="cpu", NVTE_JAX_CUSTOM_CALLS="false", NVTE_FUSED_ATTN="0")
    extension: Any = _Extension("transformer_engine_jax")
    extension.get_cublasLt_version = lambda: 130000
    extension.get_cuda_version = lambda: 13000
    extension.get_device_compute_capability = lambda *_: 90
    extension.get_cudnn_version = lambda: 91000
    extension.get_fused_attn_backend = lambda *_, **__: (extension.NVTE_Fused_Attn_Backend.NVTE_No_Backend, "none")
    sys.modules["transformer_engine_jax"] = extension
    packages: dict[str, Any] = {}
    for name in ("transformer_engine", "transformer_engine.common"):
        packages[name] = sys.modules[name] = types.ModuleType(name)
        packages[name].__path__ = [str(root / name.replace(".", "/"))]
        packages[name].__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    top, common = packages.values()
    top.common = common
    top.is_nccl_ep_available = lambda: False
    common.load_framework_extension = lambda *_: None
    common.decode_cudnn_version = lambda version: (version // 10000, version % 10000 // 100, version % 100)
    from transformer_engine.jax import flax

    return flax.TransformerLayer, flax.TransformerLayerType


def read_state(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(arrays outside of the layers, one flat dict of TE variables a layer), names without their prefixes, float32."""
    import jax.numpy as jnp
    import tensorstore as ts

    top: dict[str, Any] = {}
    layers: dict[tuple[int, int], dict[str, Any]] = {}  # (repetition, place within the repeated block)
    for path in sorted(folder.glob(f"{LM}*")):
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}}
        array = jnp.asarray(ts.open(spec, open=True).result().read().result(), jnp.float32)
        name = path.name.removeprefix(LM)
        if not (match := LAYER.fullmatch(name)):
            top[name] = array
        elif match[1]:
            for repetition, one in enumerate(array):
                layers.setdefault((repetition, int(match[2])), {})[match[3]] = one
        else:
            layers.setdefault((0, int(match[2])), {})[match[3]] = array
    return top, [layers[key] for key in sorted(layers)]


def build_layer(variables: dict[str, Any], config: dict[str, Any], rotary: bool, classes: Any) -> Any:
    """The TE module whose variables have these names and shapes."""
    TransformerLayer, TransformerLayerType = classes
    shapes = {name: array.shape for name, array in variables.items()}
    d_model = shapes["mlp.scale"][0]
    head_dim = d_model // config["n_heads"]
    holds_keys = next(name for name in ("qkv", "kv", "key") if f"attention.{name}.kernel" in shapes)
    layernorm = "mlp.ln_bias" in shapes
    gated = shapes["mlp.wi_kernel"][1] == 2
    return TransformerLayer(
        hidden_size=d_model,
        mlp_hidden_size=shapes["mlp.wi_kernel"][-1],
        num_attention_heads=config["n_heads"],
        num_gqa_groups=shapes[f"attention.{holds_keys}.kernel"][-1] // head_dim,
        layernorm_type="layernorm" if layernorm else "rmsnorm",
        layernorm_epsilon=config["norm_eps"],
        zero_centered_gamma=layernorm,  # Pax stores a LayerNorm's scale minus one, an RMSNorm's scale itself
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mlp_activations=tuple(config.get("activations", ("silu", "linear"))) if gated else ("gelu",),
        use_bias="mlp.wi_bias" in shapes,
        layer_type=TransformerLayerType.ENCODER,
        self_attn_mask_type="causal",
        enable_relative_embedding=False,
        enable_rotary_pos_emb=rotary,
        rotary_pos_emb_windows=(1, config["rope_theta"]),
        rotary_pos_emb_group_method="consecutive",
        fuse_qkv_params=holds_keys != "key",
        scale_attn_logits=True,
        transpose_batch_sequence=False,
    )


def forward(folder: Path, ids: Any, config: dict[str, Any], classes: Any) -> Any:
    """Logits [B, T, V] of tokens ``ids`` [B, T]; rotary positions unless the folder has a table of positions."""
    import jax.numpy as jnp
    from flax.traverse_util import unflatten_dict

    top, layers = read_state(folder)
    unembed = top["softmax.logits_ffn.linear.w"]
    x = jnp.take(top.get("embedding_lookup.emb_var", unembed.T), ids, axis=0)
    positions = top.get("position_emb.emb_var")
    if positions is not None:
        x += positions[: ids.shape[1]]
    layer = build_layer(layers[0], config, positions is None, classes)
    for variables in layers:
        x = layer.apply({"params": unflatten_dict(variables, sep=".")}, x, deterministic=True)
    bias = top.get("final_ln.bias")
    if bias is None:
        x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + config["norm_eps"]) * top["final_ln.scale"]
    else:
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + config["norm_eps"]) * (1 + top["final_ln.scale"]) + bias
    return x @ unembed + top.get("softmax.logits_ffn.bias.b", 0.0)


def main() -> None:
    """Run every (STATE, IDS, OUT) of the command line."""
    import numpy as np

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("files", nargs="+", help="STATE IDS.npy OUT.npy, any number of times")
    options = parser.parse_args()
    if len(options.files) % 3:
        parser.error("STATE, IDS.npy and OUT.npy come in threes")
    config = json.loads(options.config.read_text())
    classes = import_transformer_layer()
    for state, ids, out in zip(*[iter(options.files)] * 3, strict=True):
        np.save(out, np.asarray(forward(Path(state), np.load(ids), config, classes), np.float32))


if __name__ == "__main__":
    main()
