"""The GPT and GLaM runs of the Pax presets for GPUs.

Where the class and NVIDIA's page (the README of JAX-Toolbox's rosetta) disagree, a run follows the page, and its
strict variant what the code does. Classes: paxml ``contrib/gpu/scripts_gpu/configs.py`` at b397693.
"""

from typing import Any

from llmtool.presets import MODELS
from llmtool.train.recipe import Layer, Recipe

_PAGE = "NVIDIA's page of the preset"
_TASKS = "paxml scripts_gpu/tasks.py: the Pile pipeline"
_PARENT = "paxml TransformerLmSpmdAdam, inherited"
_LEARNER = "paxml tasks/lm/params/c4.py, its optimizer builder"
_GLAM = "praxis layers/glam.py and gshard_utils.py, as the class sets them"

_NO_CAP: dict[str, Any] = {"optimizer.update_rms_cap": None}
_COMMON = (
    Layer(_LEARNER, {"optimizer.kind": "pax", "optimizer.eps_root": 0.0, "schedule.kind": "pax", **_NO_CAP}),
    Layer(_PARENT, {"checkpoint.every_steps": 5000, "checkpoint.keep": 10, "log_every": 100,
                    "evaluation.every_steps": 100}),
    Layer(_TASKS, {"data.pipeline": "pax", "data.shuffle_buffer": 100_000}),
    Layer("no data is shipped; say where it lies with --data", {"data.sources": ()}),
)
_PACKING = ("data.pipeline: rows are full, so that packing, on in paxml and off in NVIDIA's container, changes nothing",
            "data.seed: Pax draws another one each run; here it is fixed")
_MIN_RATIO = "schedule.min_ratio: GPT126MBase misspells its own constant; the parent's, which counts, is 0.1 too"


def _class(name: str) -> str:
    return f"paxml scripts_gpu/configs.py, {name}"


def _adam(peak: float, warmup: int, end: int, *, b2: float = 0.95) -> dict[str, Any]:
    """What the GPT classes say of Adam, the clipping and the schedule."""
    return {
        "optimizer.learning_rate": peak, "optimizer.b1": 0.9, "optimizer.b2": b2, "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1, "optimizer.clip_norm": 1.0, "schedule.warmup_steps": warmup,
        "schedule.decay_start": warmup + 1, "schedule.decay_end": end, "schedule.min_ratio": 0.1,
    }


def _mesh(ici: tuple[int, int, int], dcn: tuple[int, int, int]) -> dict[str, Any]:
    return {"mesh.ici": ici, "mesh.dcn": dcn}


def _recipe(name: str, summary: str, *layers: Layer, strict: tuple[Layer, ...] = (), notes: tuple[str, ...]) -> Recipe:
    facts = MODELS[name]
    return Recipe(name, summary, facts.config, facts.provenance, (*_COMMON, *layers), strict, (*notes, *_PACKING))


def gpt_126m() -> Recipe:
    """126 M on 64 GPUs."""
    return _recipe(
        "gpt-126m", "GPT 126 M, 600 000 steps on 64 GPUs, pure data parallel",
        Layer(_class("GPT126MBase"), {
            **_adam(6e-4, 636, 500_000), **_mesh((8, 1, 1), (8, 1, 1)), "strategy": "ddp", "steps": 600_000,
            "seq_len": 2048, "batch_per_device": 4.0, "precision": "bf16", "remat": "none", "init_std": 0.023,
            "dropout": 0.0}),
        notes=(_MIN_RATIO,))


def gpt_5b() -> Recipe:
    """5 B on 256 GPUs."""
    source = _class("GPT5BBase")
    return _recipe(
        "gpt-5b", "GPT 5 B, 75 000 steps on 256 GPUs, fully sharded",
        Layer(source, {
            **_adam(1.6e-4, 115, 62_500), **_mesh((1, 8, 1), (1, 32, 1)), "strategy": "fsdp", "steps": 75_000,
            "seq_len": 2048, "batch_per_device": 8.0, "precision": "bf16", "remat": "save_dots", "init_std": 0.01,
            "checkpoint.every_steps": 250, "log_every": 10}),
        Layer(f"{_PAGE}: no dropout in the layers", {"dropout": 0.0}),
        strict=(Layer(f"{source}: input_dropout_prob of the scanned block", {"dropout": 0.1}),),
        notes=("dropout: the page says that there is none in the layers; the class sets 0.1 on the input of a block "
               "that is scanned 24 times, so Pax drops 10 % of the stream before every layer (--strict-pax)",
               _MIN_RATIO))


def gpt_175b() -> Recipe:
    """175 B on 256 GPUs."""
    source = _class("GPT175BBase")
    return _recipe(
        "gpt-175b", "GPT-3 175 B on 256 GPUs, fully sharded",
        Layer(source, {
            **_adam(2e-5, 265, 108_600), **_mesh((1, 8, 1), (1, 32, 1)), "strategy": "fsdp", "steps": 75_000,
            "seq_len": 2048, "batch_per_device": 6.0, "precision": "bf16", "remat": "full", "dropout": 0.0,
            "checkpoint.every_steps": 100, "log_every": 10}),
        Layer("paxml configure_gpt3_task, MLPerf's value", {"init_std": 0.006}),
        strict=(Layer("paxml GPT126MBase.task, which overwrites it", {"init_std": 0.023}),),
        notes=("init_std: configure_gpt3_task sets 0.006, then GPT126MBase.task overwrites it with 0.023 "
               "(--strict-pax); NVIDIA's run started from MLPerf's checkpoint, where neither shows",
               "steps: NVIDIA ran about 1000; 75 000 is the class's own number, short of decay_end",
               "model.vocab_size: 50257 here, 50304 in the smaller ones", _MIN_RATIO))


def glam_126m_64e() -> Recipe:
    """GLaM 126 M with 64 experts on 64 GPUs."""
    source = _class("GLaM126M64EBase")
    return _recipe(
        "glam-126m-64e", "GLaM 126 M, 64 experts (1.9 B), 600 000 steps on 64 GPUs",
        Layer(source, {
            **_adam(6e-4, 636, 500_000), "strategy": "fsdp", "steps": 600_000, "seq_len": 2048, "precision": "bf16",
            "remat": "none"}),
        Layer(_PAGE, {"batch_per_device": 8.0}),
        Layer("the class's 64-way fsdp, laid out on nodes of 8 GPUs", _mesh((1, 8, 1), (1, 8, 1))),
        _experts(6),
        strict=(Layer(source, {"batch_per_device": 4.0, **_mesh((1, 64, 1), (1, 1, 1))}),),
        notes=("batch_per_device: 8 on the page, 4 in the class (--strict-pax)",
               "mesh: the class asks for 64 devices within one node (--strict-pax)", *_GLAM_NOTES))


def glam_64b_64e() -> Recipe:
    """GLaM 64 B with 64 experts on 512 GPUs."""
    source = _class("GLaM64B64EBase")
    return _recipe(
        "glam-64b-64e", "GLaM 64 B, 64 experts (1.14 T), on 512 GPUs, fully sharded and tensor parallel",
        Layer(source, {
            **_adam(2e-5, 398, 162_900, b2=0.99), **_mesh((1, 1, 8), (1, 64, 1)), "strategy": "fsdp",
            "batch_per_device": 4.0, "precision": "bf16", "remat": "full", "checkpoint.every_steps": 100,
            "checkpoint.keep": 2}),
        Layer(_class("GLaM126M64EBase") + ", inherited", {"steps": 600_000}),
        Layer(_PAGE, {"seq_len": 2048}),
        Layer("paxml's optimizer builder takes the class's 0 for unset", {"optimizer.b1": 0.9}),
        _experts(32),
        strict=(Layer(source, {"seq_len": 1024}),),
        notes=("seq_len: 2048 on the page, 1024 in the class (--strict-pax)",
               "optimizer.b1: the class writes 0, which Pax takes for unset: it trained with 0.9, and so do we",
               *_GLAM_NOTES))


def _experts(n_moe_layers: int) -> Layer:
    """Pax weights the sum over layers by 0.01 / their number."""
    return Layer(_GLAM, {
        "capacity_factor": 2.0, "expert_groups": 64, "aux_loss_weight": 0.01 / n_moe_layers, "z_loss_weight": 0.0,
        "loss_over": "all", "dropout": 0.0})


_GLAM_NOTES = (
    "init_std: not used; each kind of GLaM's matrices is drawn as praxis draws it",
    "experts have no gate, as only so the published 1.9 B and 1.14 T parameters come out", _MIN_RATIO,
)
RUNS = (gpt_126m(), gpt_5b(), gpt_175b(), glam_126m_64e(), glam_64b_64e())
