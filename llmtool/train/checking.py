"""Whether the choices of a run can all be true at once."""

from collections.abc import Iterator

from llmtool.errors import BadChoices
from llmtool.train.config import RunConfig
from llmtool.train.overrides import value_at

_AT_LEAST: dict[str, float] = {
    "steps": 1, "seq_len": 1, "grad_accum": 1, "expert_groups": 1, "log_every": 1, "checkpoint.keep": 1,
    "evaluation.validation_batches": 1, "data.shuffle_buffer": 1,
    "optimizer.learning_rate": 0, "optimizer.eps": 0, "optimizer.eps_root": 0, "optimizer.weight_decay": 0,
    "schedule.warmup_steps": 0, "data.workers": 0, "data.seed": 0, "seed": 0, "init_std": 0, "aux_loss_weight": 0,
    "z_loss_weight": 0,
}
_MORE_THAN: dict[str, float] = {
    "batch_per_device": 0, "optimizer.clip_norm": 0, "optimizer.update_rms_cap": 0, "capacity_factor": 0,
    "data.epochs": 0, "checkpoint.every_steps": 0, "checkpoint.every_minutes": 0, "evaluation.every_steps": 0,
    "evaluation.lambada_every_steps": 0, "evaluation.lambada_limit": 0,
}
_SHARES = ("schedule.min_ratio", "optimizer.b1", "optimizer.b2", "dropout")  # in [0, 1); the first may be 1


def check_run(config: RunConfig) -> RunConfig:
    """``config`` itself; raises one error that lists every choice which is impossible, alone or beside another."""
    if problems := list(_problems(config)):
        raise BadChoices(f"the run {config.name} cannot be:", problems, shown=len(problems))
    return config


def _problems(config: RunConfig) -> Iterator[str]:
    for path, least in _AT_LEAST.items():
        if value_at(config, path) < least:
            yield f"{path} is {value_at(config, path)}; expected at least {least:g}"
    for path, bound in _MORE_THAN.items():
        if (value := value_at(config, path)) is not None and value <= bound:
            yield f"{path} is {value}; expected more than {bound:g}, or none"
    for path in _SHARES:
        value, one = value_at(config, path), path == _SHARES[0]
        if not (0 <= value <= 1 if one else 0 <= value < 1):
            yield f"{path} is {value}; expected 0 to 1{'' if one else ', less than 1'}"
    schedule, model, mesh = config.schedule, config.model, config.mesh
    if schedule.kind == "pax":
        start = schedule.warmup_steps if schedule.decay_start is None else schedule.decay_start
        end = config.steps if schedule.decay_end is None else schedule.decay_end
        if not schedule.warmup_steps <= start <= end:
            yield (f"schedule: warmup_steps {schedule.warmup_steps}, decay_start {start}, decay_end {end}; "
                   "expected in this order")
    if min(*(mesh.ici or (1,)), *mesh.dcn) < 1:
        yield f"mesh: ici {mesh.ici}, dcn {mesh.dcn}; expected whole numbers from 1 on"
    if model.position == "learned" and model.max_positions and config.seq_len > model.max_positions:
        yield (f"seq_len is {config.seq_len}, but the model has learned {model.max_positions} positions; "
               "set model.max_positions too")
    if (config.capacity_factor is not None or config.aux_loss_weight) and not model.n_experts:
        yield "capacity_factor and aux_loss_weight are of experts, and this model has none"
