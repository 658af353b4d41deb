"""How fast a run goes, as people compare runs: sequences and tokens a second, FLOP/s a device, memory, time left."""

import resource
from dataclasses import dataclass
from typing import Any

import jax

from llmtool.train.config import RunConfig
from llmtool.train.flops import peak_flops, training_flops


@dataclass(frozen=True)
class Speedometer:
    """What a run's speed is counted from. ``flops``: of the model, a token, nothing recomputed; ``peak``: FLOP/s of
    a device at most, None where that is not known (a CPU)."""

    seq_len: int
    steps: int
    devices: int
    flops: float
    peak: float | None

    @classmethod
    def of(cls, run: RunConfig) -> "Speedometer":
        """Of a run on all devices there are."""
        peak = peak_flops(jax.devices()[0].device_kind, run.precision)
        return cls(run.seq_len, run.steps, jax.device_count(), training_flops(run).model, peak)

    def read(self, step: int, seconds: float, tokens_per_second: float) -> dict[str, Any]:
        """Figures at a step that takes ``seconds``; ``mfu`` (model FLOP/s over the peak) may be None."""
        flops = tokens_per_second * self.flops / self.devices
        return {
            "tokens_per_second": tokens_per_second,
            "sequences_per_second": tokens_per_second / self.seq_len,
            "tflops_per_device": flops / 1e12,
            "mfu": None if self.peak is None else flops / self.peak,
            "memory_bytes": memory(),
            "seconds_left": max(self.steps - step, 0) * seconds,
        }


def memory() -> int:
    """The most bytes that a device of this process has held so far; on a CPU, that the process has."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return max(peaks) if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
