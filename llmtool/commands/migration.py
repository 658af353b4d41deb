"""What people type who come from ColossalAI's llama2 example or NVIDIA's Pax scripts, and what that is here.

One table for two readers: ``train/MIGRATION.md`` is :func:`page`, and ``llmtool pretrain`` takes from it the spellings
that it accepts (:data:`COLOSSAL_SHORT_OPTIONS`, :func:`colossal_overrides`, :func:`fdl_overrides`) and what it says to
an environment variable that it does not read (:func:`environment_hints`). Nothing here is heavy to import.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from llmtool.errors import BadRun

Translation = Callable[[str], list[str]]  # their value -> assignments as ``--set`` takes them


@dataclass(frozen=True)
class Row:
    """One thing that they say, in every spelling, and ours.

    ``to`` makes it a choice of a run; without, ``ours`` is an option or command to use instead; ``ours`` None: there is
    none, and ``says`` tells why. ``param``: the parameter of ``llmtool pretrain`` that takes their spelling too.
    """

    theirs: tuple[str, ...]
    ours: str | None
    says: str = ""
    to: Translation | None = None
    param: str | None = None
    kept: bool = False  # an environment variable that is read here as well, by JAX, XLA or NCCL


def _sets(*paths: str) -> Translation:
    return lambda value: [f"{path}={value}" for path in paths]


def _positive(path: str) -> Translation:
    """Zero or less means off."""
    return lambda value: [f"{path}={value if _number(value) > 0 else 'none'}"]


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise BadRun(f"{value!r} is not a number") from None


def _words(what: str, table: Mapping[str, list[str]]) -> Translation:
    def translate(value: str) -> list[str]:
        if value not in table:
            raise BadRun(f"{what} {value!r} is not one we know; expected {', '.join(table)}")
        return table[value]
    return translate


def _choice(paths: str, names: Iterable[str], says: str = "", param: str | None = None) -> Row:
    """A row whose value goes unchanged to one or more choices."""
    split = paths.split()
    return Row(tuple(names), " ".join(f"--set {path}=…" for path in split), says, _sets(*split), param)


CONFIG_NAMES: Mapping[str, str] = {
    "7b": "llama2-7b", "13b": "llama2-13b", "70b": "llama2-70b", "30b": "llama1-30b", "65b": "llama1-65b",
    "LLaMA7B": "llama2-7b", "LLaMA13B": "llama2-13b", "LLaMA70B": "llama2-70b",
    **{f"{theirs}{size}": f"{ours}gpt-{size.lower()}" for (theirs, ours), size in product(
        (("Pile", ""), ("GPT", ""), ("Synthetic", "synthetic-")), ("126M", "5B", "175B"))},
    "GLaM126M64E": "glam-126m-64e", "GLaM64B64E": "glam-64b-64e",
}
"""Their name of a configuration -> our run; ``--config`` takes either."""

PLUGINS: Mapping[str, list[str]] = {
    "gemini": ["strategy=fsdp"], "gemini_auto": ["strategy=fsdp", "offload=optimizer"],
    "zero2": ["strategy=zero2"], "zero2_cpu": ["strategy=zero2", "offload=optimizer"],
    "hybrid_parallel": ["strategy=hybrid"], "fsdp": ["strategy=fsdp"],
    "fsdp_cpu": ["strategy=fsdp", "offload=optimizer"], "3d": ["strategy=hybrid"],
    "3d_cpu": ["strategy=hybrid", "offload=optimizer"],
}
_DTYPES = {"fp16": ["precision=fp16"], "bf16": ["precision=bf16"], "fp32": ["precision=fp32"],
           "bfloat16": ["precision=bf16"], "float32": ["precision=fp32"], "float16": ["precision=fp16"]}
_SCHEDULES = {"linear_rampup_cosine_decay": ["schedule.kind=pax"], "constant": ["schedule.kind=constant"]}
_POLICIES = {"SAVE_NOTHING": ["remat=full"], "SAVE_EVERYTHING": ["remat=none"],
             "SAVE_DOT_WITH_NO_BATCH_DIMS": ["remat=save_dots"], "SAVE_QKV_OUT_PROJ": ["remat=save_qkv_out"]}
_FLAG = {"": True, "True": True, "true": True, "1": True, "False": False, "false": False, "0": False}


def _flag(on: list[str], off: list[str]) -> Translation:
    return _words("the switch", {word: on if said else off for word, said in _FLAG.items()})


COLOSSAL = (
    Row(("-c", "--config"), "--config llama2-7b", "7b, 13b, 70b (and the README's 30b, 65b: LLaMA 1's) are taken too",
        param="config"),
    Row(("-p", "--plugin"), "--strategy, --offload", "hybrid_parallel: tensor parallel 4 ways, without its pipeline",
        _words("the plugin", PLUGINS), "strategy"),
    Row(("-d", "--dataset"), "--data hf:NAME", "a file or folder needs no upload: --data jsonl:FILE", param="data"),
    _choice("data.epochs", ("-e", "--num_epochs"), "--epochs", "epochs"),
    _choice("batch_per_device", ("-b", "--batch_size"), "--batch-per-device", "batch_per_device"),
    _choice("optimizer.learning_rate", ("--lr",), "the peak", "learning_rate"),
    _choice("optimizer.weight_decay", ("-w", "--weight_decay", "--weigth_decay"), "the script misspells it",
            "weight_decay"),
    _choice("schedule.warmup_steps", ("-s", "--warmup_steps"), "", "warmup_steps"),
    Row(("-g", "--gradient_checkpoint", "--grad_checkpoint"), "--set remat=full", "a switch",
        _flag(["remat=full"], ["remat=none"]), "gradient_checkpoint"),
    _choice("seq_len", ("-l", "--max_length"), "rows are packed, not padded", "seq_len"),
    Row(("-x", "--mixed_precision"), "--precision", "theirs is fp16 unless told", _words("the precision", _DTYPES),
        "precision"),
    _choice("checkpoint.every_steps", ("-i", "--save_interval"), "", "save_interval"),
    Row(("-o", "--save_dir"), "--out", "the run's folder", param="out"),
    Row(("-f", "--load"), "--resume", "also finds the data's position and the random state again", param="resume"),
    Row(("--gradient_clipping", "--grad_clip"), "--set optimizer.clip_norm=…", "with hybrid too, where theirs does not",
        _positive("optimizer.clip_norm"), "clip_norm"),
    Row(("-t", "--tensorboard_dir"), None, "events are written into the run's folder: tensorboard --logdir OUT"),
    Row(("-a", "--flash_attention"), "--attention auto", "the default; --attention xla switches it off",
        _flag(["attention=auto"], ["attention=xla"]), "flash_attention"),
)
FINETUNE = (
    Row(("--model_path",), "llmtool sft --ckpt", "a checkpoint in any layout"),
    Row(("--task_name",), None, "it filters one data set's rows: give the rows you want as a file"),
    Row(("-e", "-b", "--lr", "-w", "-l", "-x", "-i", "-o", "-f"), "the same on llmtool sft",
        "their warm-up is 3 % of the steps, and their loss counts prompt and padding; ours counts answers"),
)
BENCHMARK = (
    Row(("benchmark.py",), "llmtool pretrain --benchmark", "on a synthetic-llama2-* run"),
    _choice("steps", ("-s", "--num_steps")),
    Row(("-i", "--ignore_steps"), "llmtool pretrain --benchmark", "leaves the first steps out by itself"),
    Row(("-x", "--xformers"), "--attention auto", "the default"),
    Row(("-m", "--memory_limit"), None, "JAX's own: XLA_PYTHON_CLIENT_MEM_FRACTION"),
    Row(("-w", "--warmup_ratio", "--shard_param_frac", "--offload_param_frac"), None,
        "knobs of gemini's chunk placement; XLA plans memory when it compiles"),
    Row(("--offload_optim_frac",), "--offload optimizer", "all of it or nothing"),
    Row(("--tp", "--extra_dp", "--zero"), "--mesh data=2,fsdp=4,tensor=4", "and --strategy"),
    Row(("--pp", "--mbs"), None, "there are no pipeline stages; --set grad_accum=N cuts a batch up in time"),
)
FDL = (
    _choice("steps", ("MAX_STEPS",)), _choice("batch_per_device", ("PERCORE_BATCH_SIZE",), "fractions too"),
    _choice("mesh.ici", ("ICI_MESH_SHAPE",), "--ici-mesh"), _choice("mesh.dcn", ("DCN_MESH_SHAPE",), "--dcn-mesh"),
    _choice("seq_len", ("MAX_SEQ_LEN",)), _choice("optimizer.learning_rate", ("LEARNING_RATE",)),
    _choice("optimizer.b1", ("ADAM_BETA1",), "Pax takes 0 for unset; here it is 0"),
    _choice("optimizer.b2", ("ADAM_BETA2",)),
    _choice("optimizer.eps", ("ADAM_EPSILON",)), _choice("optimizer.eps_root", ("ADAM_EPSILON_ROOT",)),
    _choice("optimizer.weight_decay", ("WEIGHT_DECAY",)),
    Row(("ADAM_CLIP_THRESHOLD",), "--set optimizer.update_rms_cap=…", "0 or less: off; Pax takes 0 for 1",
        _positive("optimizer.update_rms_cap")),
    Row(("CLIP_GRADIENT_NORM_TO_VALUE",), "--set optimizer.clip_norm=…", "0 or less: off; Pax takes 0 for 5",
        _positive("optimizer.clip_norm")),
    Row(("LR_SCHEDULE",), "--set schedule.kind=…", "", _words("the schedule", _SCHEDULES)),
    _choice("schedule.warmup_steps", ("LR_COS_WARMUP",)), _choice("schedule.decay_start", ("LR_COS_DECAY_START",)),
    _choice("schedule.decay_end", ("LR_COS_DECAY_END",)),
    _choice("schedule.min_ratio", ("LR_COS_MIN_RATIO", "R_COS_MIN_RATIO"), "the class misspells it"),
    _choice("init_std", ("INIT_STD",)), _choice("dropout", ("DROPOUT_PROB",)),
    _choice("checkpoint.every_steps", ("CHECKPOINT_EVERY_N_STEPS",)),
    _choice("checkpoint.keep", ("CHECKPOINT_MAX_TO_KEEP",)), _choice("log_every", ("SUMMARY_INTERVAL_STEPS",)),
    _choice("evaluation.every_steps", ("EVAL_INTERVAL_STEPS",)),
    Row(("FPROP_DTYPE",), "--precision", "", _words("the dtype", _DTYPES)),
    Row(("CHECKPOINT_POLICY",), "--set remat=…", "", _words("the policy", _POLICIES)),
    _choice("model.n_layers", ("NUM_LAYERS",)), _choice("model.d_model", ("MODEL_DIMS",)),
    _choice("model.d_ff", ("HIDDEN_DIMS",)), _choice("model.head_dim", ("DIMS_PER_HEAD",)),
    _choice("model.n_heads model.n_kv_heads", ("NUM_HEADS",)), _choice("model.vocab_size", ("VOCAB_SIZE",)),
    Row(("USE_REPEATED_LAYER",), None, "layers are always stacked and scanned"),
    Row(("PACKED_INPUT",), "--pipeline packed|pax", "their rows are full either way"),
    Row(("USE_FP8",), None, "there is no FP8 yet"),
    Row(("USE_LORA",), "llmtool lora", "a command of its own"),
    Row(("LORA_RANK",), "llmtool lora --rank", "alpha equals the rank in Pax: a scale of 1"),
    Row(("LORA_TARGET_LAYERS",), "llmtool lora --target", "all, attention, mlp"),
)
ENVIRONMENT = (
    *(row for row in FDL if row.theirs[0] in (
        "MAX_STEPS", "MAX_SEQ_LEN", "PERCORE_BATCH_SIZE", "ICI_MESH_SHAPE", "DCN_MESH_SHAPE", "LEARNING_RATE",
        "LR_SCHEDULE", "LR_COS_WARMUP", "USE_REPEATED_LAYER", "USE_LORA", "LORA_RANK", "LORA_TARGET_LAYERS")),
    Row(("CONFIG",), "--config", "LLaMA7B and the like are taken too"),
    Row(("VOCAB_PATH",), "--tokenizer", "not needed for synthetic data"),
    Row(("TFDS_DATA_DIR",), "--data tfds:FOLDER"),
    Row(("CHECKPOINT_RESTORE_PATH",), "--ckpt", "any layout; nothing is appended to the path"),
    Row(("LOG_DIR", "BASE_DIR"), "--out"),
    Row(("EVAL_ONLY",), "llmtool eval boolq --ckpt", "with a batch and mesh of its own, not the training's"),
    Row(("USE_MULTIPROCESS",), None, "found out under Slurm, Open MPI and Kubernetes; else --coordinator"),
    Row(("ENABLE_TE",), None, "there are no Transformer Engine layers yet; `llmtool convert` reads and writes theirs"),
    Row(("ENABLE_FP8",), None, "there is no FP8 yet; Pax forces it off for LLaMA"),
    Row(("NVTE_FUSED_ATTN",), "--attention auto|xla|cudnn"),
    Row(("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN"), None, "knobs of Transformer Engine"),
    Row(("BASE_XLA_FLAGS",), "XLA_FLAGS", "several of the 24.04 flags are gone from XLA, which stops at unknown ones"),
    Row(("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "NCCL_IB_SL", "NCCL_PROTO"), "the same variables",
        "read by XLA, JAX and NCCL", kept=True),
)
PAX_FLAGS = (
    Row(("--fdl_config",), "--config", "their names of presets are taken too"),
    Row(("--job_log_dir",), "--out"), Row(("--tfds_data_dir",), "--data tfds:FOLDER"),
    Row(("--multiprocess_gpu",), None, "found out under Slurm, Open MPI and Kubernetes"),
    Row(("--server_addr",), "--coordinator HOST:PORT"), Row(("--num_hosts",), "--num-processes"),
    Row(("--host_idx",), "--process-id"), Row(("--mode=eval",), "llmtool eval lambada --ckpt"),
    Row(("--enable_checkpoint_saving",), "--set checkpoint.every_steps=none", "when False",
        _words("the switch", {"False": ["checkpoint.every_steps=none"], "True": []})),
    Row(("--alsologtostderr",), None, "progress and logs go to stderr as it is"),
)
SECTIONS: Mapping[str, tuple[Row, ...]] = {
    "ColossalAI: pretrain.py": COLOSSAL, "ColossalAI: finetune.py": FINETUNE, "ColossalAI: benchmark.py": BENCHMARK,
    "Pax: --fdl.NAME=VALUE": FDL, "Pax: environment of the scripts": ENVIRONMENT, "Pax: flags of paxml.main": PAX_FLAGS,
}
COLOSSAL_SHORT_OPTIONS: Mapping[str, tuple[str, ...]] = {
    row.param: row.theirs for row in COLOSSAL if row.param is not None
}
"""Parameter of ``llmtool pretrain`` -> ColossalAI's spellings of its option, which click.option takes beside ours."""


def colossal_overrides(param: str, value: str = "") -> list[str]:
    """The assignments that a ColossalAI option with this value (none for a switch) stands for."""
    row = next(row for row in COLOSSAL if row.param == param)
    return [] if row.to is None else row.to(value)


def fdl_overrides(arguments: Iterable[str]) -> list[str]:
    """The assignments that Pax' ``--fdl.NAME=VALUE`` stand for; BadRun, with what to do, where there are none."""
    known = {name: row for row in FDL for name in row.theirs}
    found: list[str] = []
    for argument in arguments:
        name, equals, value = argument.removeprefix("--fdl.").partition("=")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise BadRun(f"{argument}: no such field is known here; "
                         + (f"did you mean {close[0]}?" if close else "set ours: --set path=value (llmtool presets)"))
        row = known[name]
        if row.to is None:
            raise BadRun(f"{argument}: {_instead(row)}")
        if not equals:
            raise BadRun(f"{argument}: expected --fdl.{name}=VALUE")
        found += row.to(value.strip("\"'"))
    return found


def environment_hints(environment: Mapping[str, str]) -> list[str]:
    """A line for each variable of NVIDIA's scripts that is set and that nothing reads here."""
    return [f"{name} is set, but is not read here: {_instead(row)}"
            for row in ENVIRONMENT if not row.kept for name in row.theirs if name in environment]


def _instead(row: Row) -> str:
    return row.says if row.ours is None else f"use {row.ours}" + (f" ({row.says})" if row.says else "")


def page() -> str:
    """The text of train/MIGRATION.md."""
    return "\n".join(_lines()) + "\n"


_INTRODUCTION = """\
# Coming from ColossalAI or Pax

What you type there, and what it is here. `--set path=…` changes any choice of a run (`llmtool presets show NAME` lists
them); other options are those of `llmtool pretrain`. A dash: there is none, and why.

`llmtool pretrain` takes ColossalAI's spellings, short and long, and Pax' `--fdl.NAME=VALUE` as they are. It reads none
of the variables of NVIDIA's scripts, and says so where one is set."""


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    for title, rows in SECTIONS.items():
        yield f"\n## {title}\n\n| there | here | note |\n|---|---|---|"
        for row in rows:
            theirs = ", ".join(f"`{name}`" for name in row.theirs)
            ours = "—" if row.ours is None else f"`{row.ours}`"
            yield f"| {theirs} | " + ours.replace("|", "\\|") + f" | {row.says} |"
    yield "\n## Names\n\n| configuration or plugin there | here |\n|---|---|"
    for name, ours in CONFIG_NAMES.items():
        yield f"| `{name}` | `--config {ours}` |"
    for name, assignments in PLUGINS.items():
        yield f"| `{name}` | `{' '.join('--' + each.replace('=', ' ') for each in assignments)}` |"


if __name__ == "__main__":
    print(page(), end="")
