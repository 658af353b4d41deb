"""Plans: state bytes as the page's formula has them and as the compiled step takes them; no weight is allocated."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from llmtool import cli
from llmtool.errors import Contradiction
from llmtool.presets import parameter_count
from llmtool.train.config import RunConfig
from llmtool.train.flops import training_flops
from llmtool.train.overrides import override
from llmtool.train.plan import absent_devices, plan
from llmtool.train.presets import run_config

TINY = {"gpt-tiny": (), "llama-tiny": (), "glam-tiny": ("batch_per_device=2",), "mixtral-tiny": (), "neox-tiny": ()}
# strategy -> over which mesh axes, besides tensor, (parameters, gradients, moments) of a matrix are split
SPLIT = {"ddp": ("", "", ""), "zero2": ("", "df", "df"), "fsdp": ("f", "f", "f"), "tensor": ("", "", ""),
         "hybrid": ("f", "f", "f")}


def tiny(name: str, *choices: str) -> RunConfig:
    return override(run_config(name), ["seq_len=16", "batch_per_device=2", *TINY[name], *choices])


def formula(run: RunConfig, mesh: dict[str, int]) -> tuple[int, int, int]:
    """The page's formula, from sizes alone: 4 bytes a number; matrices split over the strategy's axes and tensor,
    vectors whole, experts' over the experts. Sizes of these models divide."""
    m, t = run.model, mesh["tensor"]
    norm = 2 if m.norm == "layernorm" else 1
    q, kv = m.n_heads * m.head_dim, m.n_kv_heads * m.head_dim
    split, by_model, whole = 0, m.max_positions * m.d_model if m.position == "learned" else 0, norm * m.d_model
    split += m.vocab_size * m.d_model * (1 if m.tied else 2)
    for layer in range(m.n_layers):
        moe = m.is_moe(layer)
        split += m.d_model * (2 * q + 2 * kv)
        whole += 2 * norm * m.d_model + (m.d_model if m.attn_out_bias else 0)
        by_heads = (q + 2 * kv) if m.qkv_bias else 0
        split += 0 if moe else m.d_model * m.d_ff * (3 if m.gated else 2)
        whole += m.d_model if m.mlp_bias and not moe else 0
        if moe:
            split += m.n_experts * m.d_model * m.expert_d_ff * (3 if m.experts_gated else 2)
            by_model += m.d_model * m.n_experts
        whole += m.d_ff if m.mlp_bias and not moe else 0
        split_by_tensor = by_heads + m.n_heads * m.relative_buckets
        whole += split_by_tensor if t == 1 else 0
        assert t == 1 or not split_by_tensor
    found = []
    for axes in SPLIT[run.strategy]:
        ways = math.prod({"d": mesh["data"], "f": mesh["fsdp"]}[axis] for axis in axes)
        found.append(4 * (split // (ways * t) + by_model // ways + whole))
    return found[0], found[1], 2 * found[2]


@pytest.mark.parametrize("strategy", SPLIT)
@pytest.mark.parametrize("name", TINY)
def test_state_bytes_are_the_formula(name: str, strategy: str) -> None:
    run = tiny(name, f"strategy={strategy}", "mesh.ici=2,4,1")
    found = plan(run, jax.devices()[:8], compiled=False)
    state = found["state"]
    assert (state["parameters"], state["gradients"], state["moments"]) == formula(run, found["mesh"])
    assert found["compiled"] is None


def test_state_bytes_with_tensor_parallelism() -> None:
    run = tiny("llama-tiny", "mesh.ici=2,2,2")
    found = plan(run, jax.devices()[:8], compiled=False)
    assert tuple(found["state"].values())[:3] == formula(run, {"data": 2, "fsdp": 2, "tensor": 2})


@pytest.mark.parametrize(("name", "choices"), [
    ("llama-tiny", ("mesh.ici=1,4,2",)),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("gpt-tiny", ("strategy=zero2", "mesh.ici=8,1,1", "grad_accum=2")),
        ("glam-tiny", ("remat=full",)),
        ("llama-tiny", ("precision=fp16",)),
    )),
])
def test_the_compiled_step_takes_so_many_bytes(name: str, choices: tuple[str, ...]) -> None:
    """The compiler's own figures: arguments that the step gives back in place are the state, no more and no less."""
    found = plan(tiny(name, *choices), jax.devices()[:8])
    compiled, state = found["compiled"], found["state"]
    assert compiled["reused_bytes"] == compiled["state_bytes"]
    assert 0 < compiled["state_bytes"] - state["parameters"] - state["moments"] <= 32  # step, counts, keys
    assert compiled["argument_bytes"] > compiled["reused_bytes"]


def test_one_device_holds_all() -> None:
    run = tiny("llama-tiny")
    found = plan(run, jax.devices()[:1], compiled=False)
    assert found["state"]["parameters"] == 4 * parameter_count(run.model)
    assert found["state"]["moments"] == 8 * parameter_count(run.model)
    assert set(found["estimates"]["sent_per_step"].values()) == {0}
    assert found["flops"]["model_per_step"] == training_flops(run).model * 2 * 16


def test_offloaded_moments_are_not_the_devices() -> None:
    here, there = (plan(tiny("llama-tiny", f"offload={word}"), jax.devices()[:8], compiled=False)
                   for word in ("none", "optimizer"))
    assert there["state"]["host"] == there["state"]["moments"] == here["state"]["moments"]
    assert here["estimates"]["total"] - there["estimates"]["total"] == here["state"]["moments"]


def estimates(*choices: str) -> dict[str, Any]:
    return plan(override(run_config("llama2-7b"), choices), jax.devices()[:8], compiled=False)["estimates"]


def test_remat_keeps_less_and_in_this_order() -> None:
    kept = {name: each["kept"] for name, each in estimates()["activations"].items()}
    assert kept["full"] < kept["save_qkv_out"] < kept["save_dots"] < kept["none"]


def test_full_remat_keeps_the_stream_once_a_layer() -> None:
    kept = estimates("remat=full")["activations"]["full"]["kept"]
    assert kept == 2 * 2 * 4096 * 4096 * (32 + 3)  # bytes, rows, tokens, width, layers and both ends


def test_scores_are_held_without_a_fused_kernel() -> None:
    fused, plain = estimates(), estimates("attention=xla")
    assert (fused["fused_attention"], plain["fused_attention"]) == (True, False)
    more = plain["activations"]["none"]["kept"] - fused["activations"]["none"]["kept"]
    assert more == 32 * 32 * 2 * 4096 * 4096 * (4 + 2)  # layers, heads, rows, T, T; softmax in float32 and its cast


def test_traffic_of_strategies() -> None:
    """Ring collectives, by hand: a matrix of n numbers is gathered twice and its gradient scattered once in bf16."""
    n = parameter_count(run_config("llama2-7b").model)
    fsdp = estimates()["sent_per_step"]
    assert fsdp["data"] == fsdp["tensor"] == 0
    assert fsdp["fsdp"] == pytest.approx(3 * 2 * n * 7 / 8, rel=1e-3)
    ddp = estimates("strategy=ddp")["sent_per_step"]
    assert ddp["data"] == pytest.approx(2 * 2 * n * 7 / 8, rel=1e-3)
    zero2 = estimates("strategy=zero2")["sent_per_step"]
    assert zero2["data"] == pytest.approx((2 + 4) * n * 7 / 8, rel=1e-3)
    tensor = estimates("strategy=tensor", "remat=full")["sent_per_step"]
    assert tensor["tensor"] == (32 * 5 + 2) * 16 * 7 // 4 * 4096 * 4096 * 2  # 16 rows, bf16
    assert tensor["fsdp"] == tensor["data"] == 0


def test_fits_or_by_how_much_not() -> None:
    run, devices = run_config("llama2-7b"), jax.devices()[:8]
    need = plan(run, devices, compiled=False)["estimates"]["total"]
    for memory, fits in ((need, True), (need - 1, False)):
        told = plan(run, devices, memory=memory, compiled=False)["estimates"]
        assert (told["fits"], told["spare"]) == (fits, memory - need)


def test_a_mesh_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(Contradiction, match=r"--ici-mesh 1,8,1 .*would fit"):
        plan(run_config("gpt-5b"), jax.devices()[:8], compiled=False)


def test_too_many_devices_for_this_process() -> None:
    with pytest.raises(Contradiction, match="new one"):
        absent_devices(len(jax.devices()) + 1)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--config", "llama-tiny", "--mesh", "data=2,fsdp=2,tensor=2", "--batch-per-device", "0.5"]
    assert cli.main(["plan", *small, "--no-compile", "--json", "--set", "seq_len=16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert found["rows_per_step"] == 4
    assert cli.main(["plan", *small, "--no-compile", "--memory", "0.001"]) == 0
    out = capsys.readouterr().out
    assert "does not fit 1 MB" in out
    assert "Megatron" in out


@pytest.mark.parametrize(("args", "message"), [
    (["--config", "llama2-70b"], "say how many --devices"),
    (["--config", "gpt-5b", "--devices", "8"], "--ici-mesh 1,8,1 "),
    (["--config", "gpt-5", "--devices", "8"], "did you mean"),
    (["--config", "llama-tiny", "--devices", "8", "--ici-mesh", "2,4"], "mesh.ici"),
    (["--config", "llama-tiny", "--devices", "8", "--batch-per-device", "0.3"], "would fit"),
])
def test_mistakes(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), [
    ("gpt-5b", 256), ("gpt-175b", 256), ("llama2-70b", 16), ("glam-64b-64e", 512)])
def test_large_models_are_planned_in_little_time_and_memory(name: str, devices: int, root: Path) -> None:
    code = ("import resource, sys\nfrom llmtool.cli import main\nstatus = main(sys.argv[1:])\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\nsys.exit(status)")
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "--config", name, "--devices", str(devices), "--json"],
        capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["compiled"]["reused_bytes"] == found["compiled"]["state_bytes"]
    assert found["state"]["moments"] == 2 * found["state"]["parameters"] == 2 * found["state"]["gradients"]
    ideal = 4 * found["parameters"] / devices
    assert ideal <= found["state"]["parameters"] < 1.08 * ideal  # vectors, and a vocabulary that does not divide
    assert int(done.stderr.split()[-1]) * 1024 < 12e9
