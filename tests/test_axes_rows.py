"""The algebra: patterns are bijections, a row's views partition its array, and any layout inverts itself."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtool import axes, params
from llmtool.convert.carry import carry
from llmtool.convert.kernels import copy_into
from llmtool.convert.layouts import gguf, hf, meta, native, pax, te
from llmtool.convert.plan import make_plan
from llmtool.convert.row import StoredShapes, Table
from llmtool.convert.stores.base import TensorSpec
from llmtool.errors import CannotHold
from llmtool.model_config import ModelConfig

F32 = np.dtype(np.float32)


@st.composite
def groupings(draw):
    """An order of some axes, cut into dimensions."""
    names = draw(st.permutations(["D", "K", "G", "H", "F"]))
    cuts = draw(st.lists(st.booleans(), min_size=4, max_size=4))
    groups, group = [], [names[0]]
    for name, cut in zip(names[1:], cuts, strict=True):
        if cut:
            groups.append(tuple(group))
            group = []
        group.append(name)
    return tuple([*groups, tuple(group)])


@given(groupings(), groupings(), st.lists(st.integers(1, 5), min_size=5, max_size=5))
def test_two_patterns_over_the_same_axes_are_a_bijection(one, other, lengths):
    sizes = dict(zip("DKGHF", lengths, strict=True))
    x = np.arange(math.prod(lengths)).reshape(axes.shape(one, sizes))
    y = np.empty(axes.shape(other, sizes), x.dtype)
    hole = axes.ordered(axes.opened(y, other, sizes), axes.flat(other), axes.flat(one))
    hole[...] = axes.opened(x, one, sizes)
    back = np.empty_like(x)
    axes.opened(back, one, sizes)[...] = hole
    assert np.array_equal(back, x) and sorted(y.reshape(-1)) == list(range(x.size))


def test_a_pattern_round_trips_through_its_text():
    assert axes.parse("(K G H) D") == (("K", "G", "H"), ("D",))
    assert axes.parse("J D (K G) H") == (("J",), ("D",), ("K", "G"), ("H",))
    assert axes.substitute(axes.parse("(K H) D"), {"H": ("R", "P")}) == (("K", "R", "P"), ("D",))


def test_an_axis_longer_than_one_cannot_fall_away():
    with pytest.raises(ValueError, match="axis K"):
        axes.ordered(np.zeros((2, 3)), ("K", "D"), ("D",))


@given(st.data())
@settings(max_examples=60)
def test_the_copy_kernel_is_an_assignment(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    order = data.draw(st.permutations(range(len(shape))))
    dtype = data.draw(st.sampled_from([np.uint16, np.float32, np.float64]))
    x = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    source = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    out = np.full(tuple(n + 1 for n in shape), 7, dtype)[tuple(slice(0, n) for n in shape)]
    copy_into(out, source)
    assert np.array_equal(out, x)


def configs():
    """Models whose sizes are pairwise distinct, so that no swapped axes can hide."""
    llama = ModelConfig(
        "llama",
        vocab_size=37,
        d_model=12,
        n_layers=3,
        n_heads=6,
        n_kv_heads=2,
        head_dim=10,
        d_ff=20,
        norm="rmsnorm",
        gated=True,
        position="rope",
        tied=False,
        norm_eps=1e-5,
        rope_theta=1e4,
        activation="silu",
    )
    biased = dataclasses.replace(llama, qkv_bias=True, attn_out_bias=True, mlp_bias=True)
    gpt = dataclasses.replace(
        biased,
        family="gpt",
        n_kv_heads=6,
        norm="layernorm",
        gated=False,
        position="learned",
        max_positions=11,
        tied=True,
        rope_theta=None,
        activation="gelu_tanh",
    )
    return {
        "gqa": llama,
        "mqa": dataclasses.replace(llama, n_kv_heads=1),
        "mha": dataclasses.replace(llama, n_kv_heads=6),
        "odd ratio": dataclasses.replace(llama, n_heads=12, n_kv_heads=3, head_dim=4),  # 12/3 is not 3
        "odd heads": dataclasses.replace(llama, n_heads=3, n_kv_heads=3, head_dim=6),
        "pair": dataclasses.replace(llama, n_heads=3, n_kv_heads=1, head_dim=2),
        "tied": dataclasses.replace(llama, tied=True),
        "biased": biased,
        "biased mqa": dataclasses.replace(biased, n_kv_heads=1, unembed_bias=True),
        "gpt": gpt,
        "gpt untied": dataclasses.replace(gpt, tied=False, position="sinusoidal"),
        "block of 3": dataclasses.replace(llama, n_layers=6, block_period=3),
    }


def tables(config: ModelConfig) -> dict[str, Table]:
    """Every table that has rows for the model, in every variant."""
    out: dict[str, Table] = {"native": native.table(config)}
    if config.family == "llama" and not config.unembed_bias:
        out["gguf"] = gguf.table(config)
    for name, build in (
        ("hf", lambda: hf.table(config)),
        ("meta", lambda: meta.table(config)),
        ("meta vocab", lambda: meta.table(config, "vocab")),
    ):
        try:
            out[name] = build()
        except CannotHold:
            continue
    mha = config.n_heads == config.n_kv_heads
    for repeat in (False, True):
        for rope in ("half", "interleaved"):
            for norm in ("centred", "direct"):
                given = {"repeat": repeat, "rope": rope, "norm": norm}
                for qkv in ("split", *(("combined",) if mha else ())):
                    out[f"pax {repeat} {rope} {norm} {qkv}"] = pax.table(config, qkv=qkv, **given)
                for qkv in ("kv_packed", "separate", *(("qkv_packed",) if mha else ())):
                    gate = "act_first" if repeat else "linear_first"
                    bias = {"separate": "te", "kv_packed": "pax_split", "qkv_packed": "pax"}[qkv]
                    out[f"te {repeat} {rope} {norm} {qkv}"] = te.table(
                        config, qkv=qkv, gate=gate, bias=bias, ln="pax" if bias == "pax" else "te", **given
                    )
    return out


class Memory:
    """A store that is a dict of arrays."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.arrays = {key: np.full(spec.shape, np.nan, spec.dtype) for key, spec in tensors.items()}

    def read(self, key, index=()):
        return self.arrays[key][index]

    def write(self, key, index, x, first_row=0):
        hole = self.arrays[key][index]
        assert np.isnan(hole[first_row : first_row + len(x)]).all(), "written twice"
        hole[first_row : first_row + len(x)] = x

    def where(self, key):
        return key

    def close(self):
        pass


def full(table: Table, config: ModelConfig) -> Memory:
    """A checkpoint in this layout, every value distinct."""
    bounds = [bound for bound in table.bind(config) if not bound.row.optional]
    shapes = StoredShapes.of(bounds, params.sizes(config)).shapes
    store = Memory({key: TensorSpec(F32, shape) for key, shape in shapes.items()})
    at = 1
    for array in store.arrays.values():
        array[...] = np.arange(at, at + array.size).reshape(array.shape)
        at += array.size
    return store


def converted(store: Memory, source: Table, target: Table, config: ModelConfig) -> Memory:
    plan = make_plan(source, target, config, store.tensors)
    out = Memory(dict(plan.targets))
    carry(plan, store, out, remainders={})
    assert not any(np.isnan(array).any() for array in out.arrays.values()), "a value was not written"
    return out


@pytest.mark.parametrize("name", configs())
def test_every_layout_there_and_back_and_by_any_path(name):
    config = configs()[name]
    found = tables(config)
    base = found["native"]
    store = full(base, config)
    reached = {key: converted(store, base, table, config) for key, table in found.items()}
    names = list(found)
    for key, table in found.items():
        back = converted(reached[key], table, base, config)
        assert all(np.array_equal(back.arrays[k], store.arrays[k]) for k in store.arrays), key
    for one, other in itertools.pairwise(names):  # a chain of neighbours: path independence
        direct = converted(reached[one], found[one], found[other], config)
        assert all(np.array_equal(direct.arrays[k], reached[other].arrays[k]) for k in direct.arrays), (one, other)


@pytest.mark.parametrize("name", configs())
def test_tables_are_total_and_disjoint(name):
    config = configs()[name]
    wanted = {weight.name for weight in params.weights(config)}
    for key, table in tables(config).items():
        bounds = [bound for bound in table.bind(config) if not bound.row.copy_of]
        held = [weight for bound in bounds for weight in bound.names.values()]
        assert len(held) == len(set(held)), key
        assert set(held) == wanted, key
        assert len({bound.slot for bound in bounds}) == len(bounds), key


def test_bands_write_what_a_whole_write_does(monkeypatch):
    config = configs()["gqa"]
    found = tables(config)
    store = full(found["native"], config)
    whole = {key: converted(store, found["native"], table, config) for key, table in found.items()}
    monkeypatch.setattr("llmtool.convert.carry.BAND_BYTES", 64)
    for key, table in found.items():
        banded = converted(store, found["native"], table, config)
        assert all(np.array_equal(banded.arrays[k], whole[key].arrays[k]) for k in banded.arrays), key


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 7))
def test_rope_orders_are_inverse_of_each_other(heads, pairs, width):
    """Against the formulas of Meta's and transformers' own code, for odd head counts too."""
    config = ModelConfig(
        "llama",
        vocab_size=5,
        d_model=width,
        n_layers=1,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=2 * pairs,
        d_ff=3,
        norm="rmsnorm",
        gated=True,
        position="rope",
        tied=False,
    )
    source, target = meta.table(config), hf.table(config)
    store = full(source, config)
    out = converted(store, source, target, config)
    h = 2 * pairs
    stored = store.arrays["layers.0.attention.wq.weight"]
    expected = stored.reshape(heads, h // 2, 2, width).swapaxes(1, 2).reshape(heads * h, width)
    assert np.array_equal(out.arrays["model.layers.0.self_attn.q_proj.weight"], expected)
    assert np.array_equal(
        out.arrays["model.layers.0.self_attn.v_proj.weight"], store.arrays["layers.0.attention.wv.weight"]
    )
    back = converted(out, target, source, config)
    assert np.array_equal(back.arrays["layers.0.attention.wq.weight"], stored)
