"""A run's figures as TensorBoard events, under paxml's names where it has one: ``tensorboard --logdir RUN``."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from llmtool.train.event_file import EventFile

TRAIN, EVAL = "summaries/train", "summaries/eval"  # folders of a run
_TRAIN: Mapping[str, tuple[str, ...]] = {
    "loss": ("total_loss",), "xent": ("avg_xent", "log_pplx"), "aux_loss": ("aux_loss",),
    "tokens": ("num_predictions",), "lr": ("learning/lr",), "grad_norm": ("learning/raw_grad_norm",),
    "clipped_norm": ("learning/clipped_grad_norm",), "loss_scale": ("learning/loss_scale",),
    "data_wait": ("speed/data_wait",),
}  # fmt: skip
_VALIDATION: Mapping[str, tuple[str, ...]] = {"loss": ("total_loss", "avg_xent", "log_pplx")}
_SPEED = ("tokens_per_second", "sequences_per_second", "tflops_per_device", "mfu", "memory_bytes")


class TensorBoard:
    """Takes the lines of ``metrics.jsonl`` as they are written, and the speed at each."""

    def __init__(self, workdir: Path):
        self.workdir = workdir
        self._files: dict[str, EventFile] = {}

    def add(self, line: Mapping[str, Any], speed: Mapping[str, Any]) -> None:
        """Write the events of one line."""
        match line["kind"]:
            case "train":
                values = _renamed(line, _TRAIN)
                values |= {f"speed/{name}": speed[name] for name in _SPEED if speed.get(name) is not None}
                values["learning/is_valid_step"] = 1.0 - float(line["update_skipped"])
                values["Steps/sec"] = 1.0 / line["seconds"]
                self._file(TRAIN, line["step"]).scalars(line["step"], values)
            case "validation":
                self._file(EVAL, line["step"]).scalars(line["step"], _renamed(line, _VALIDATION))
            case _:
                found = {key: float(value) for key, value in line.items() if key not in ("kind", "step")}
                self._file(EVAL, line["step"]).scalars(line["step"], found)

    def _file(self, name: str, step: int) -> EventFile:
        if name not in self._files:
            self._files[name] = EventFile(self.workdir / name, step)
        return self._files[name]

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()


def _renamed(line: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    return {tag: float(line[key]) for key, tags in names.items() if key in line for tag in tags}
