"""The FLOP formula against the products of the step itself, and against what others publish."""

import dataclasses
import math
from typing import Any

import jax
import pytest

from llmtool.model_config import ModelConfig
from llmtool.train.batch import Batch
from llmtool.train.flops import (
    DEVICES,
    colossalai_flops,
    forward_flops,
    measured_peak,
    megatron_flops,
    peak_flops,
    training_flops,
)
from llmtool.train.overrides import override
from llmtool.train.presets import run_config
from llmtool.train.state import abstract_state
from llmtool.train.step import make_step
from llmtool.train.strategy import place, rows_per_step


def products(jaxpr: Any) -> float:
    """FLOPs of every dot product in a program, a loop's body as often as it runs."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contract)
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        inner = [value for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"))
            if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
        assert len(inner) < 2 or eqn.primitive.name != "scan"
        total += times * sum(products(getattr(each, "jaxpr", each)) for each in inner)
    return total


def counted(name: str, *choices: str) -> tuple[float, float]:
    """(FLOPs of the step's products, those of the formula with all keys computed), each of the whole batch."""
    run = override(run_config(name), ["batch_per_device=2", "seq_len=32", "attention=xla", *choices])
    placement = place(run, jax.devices()[:1])
    state = abstract_state(run)
    rows = rows_per_step(run, placement.mesh)
    shapes = [jax.ShapeDtypeStruct((1, rows, run.seq_len), dtype)
              for dtype in ("int32", "int32", "float32", "int32", "int32")]
    step = make_step(run, placement, state)
    found = products(jax.make_jaxpr(step)(state, Batch(*shapes)).jaxpr)
    return found, training_flops(run, causal=False).hardware * rows * run.seq_len


@pytest.mark.parametrize("remat", ["none", "full", "save_dots", "save_qkv_out"])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "neox-tiny", "glam-tiny"])
def test_the_formula_counts_the_products_of_the_step(name: str, remat: str) -> None:
    found, formula = counted(name, f"remat={remat}")
    assert found == pytest.approx(formula, rel=1e-9)


def test_more_layers_rows_and_tokens_cost_in_proportion() -> None:
    for choice in ("model.n_layers=8", "batch_per_device=4", "seq_len=64", "model.vocab_size=700"):
        found, formula = counted("llama-tiny", choice)
        assert found == pytest.approx(formula, rel=1e-9), choice


def test_colossalai_published_figure() -> None:
    """24.26 samples/s of 4096 tokens on 32 GPUs are its 167.4 TFLOP/s a GPU."""
    run = dataclasses.replace(run_config("llama2-7b"), remat="full")
    assert 24.26 * 4096 * colossalai_flops(run) / 32 / 1e12 == pytest.approx(167.4, abs=0.05)


def test_megatron_agrees_with_ours_on_a_gpt_without_the_causal_half() -> None:
    """Its formula counts all keys, and the whole forward pass of the layers as recomputed."""
    run = run_config("gpt-175b")
    ours = forward_flops(run.model, run.seq_len, causal=False)
    layers = sum(ours.values()) - ours["unembed"]
    assert megatron_flops(run) == pytest.approx(4 * layers + 3 * ours["unembed"], rel=1e-12)
    plain = dataclasses.replace(run, remat="none")
    assert megatron_flops(plain) == pytest.approx(megatron_flops(run) * 3 / 4, rel=1e-12)


def test_six_a_parameter_is_the_bulk() -> None:
    flops = training_flops(run_config("llama2-70b"))
    assert flops.model / (6 * 68_976_648_192) == pytest.approx(1, rel=0.04)
    assert 1.2 < flops.hardware / flops.model < 4 / 3  # a third more, less the last product of each layer


def test_experts_cost_what_the_chosen_ones_do() -> None:
    config: ModelConfig = run_config("glam-64b-64e").model
    few = dataclasses.replace(config, n_experts=8)
    a, b = forward_flops(config, 2048), forward_flops(few, 2048)
    assert {key for key in a if a[key] != b[key]} == {"router"}
    assert a["experts_up"] == 2 * 8192 * 2 * 32768 * 32


def test_peaks() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") == 66.9e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("cpu", "fp32") is None
    assert DEVICES["A100-SXM4-40GB"].memory < DEVICES["A100"].memory
    assert peak_flops("NVIDIA GH200 480GB", "bf16") == 989.4e12
    assert measured_peak(size=64, rounds=3) > 1e6
