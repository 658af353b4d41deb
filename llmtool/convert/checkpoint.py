"""An opened checkpoint: its arrays, its facts, and the table that says what the arrays mean."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from llmtool import params
from llmtool.convert.carry import read_weight
from llmtool.convert.facts import Facts
from llmtool.convert.layout_word import Word
from llmtool.convert.manifest import Manifest, unchanged
from llmtool.convert.plan import check_source
from llmtool.convert.row import Bound, Table
from llmtool.convert.stores.base import Source, TensorSpec
from llmtool.errors import MissingFact, PlanError
from llmtool.model_config import ModelConfig

SIZES = (
    "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "family", "norm", "gated", "tied",
)  # fmt: skip


@dataclass
class Checkpoint:
    """A checkpoint in any layout, opened from its headers. Close it, or use it as a context manager.

    ``word`` is the full layout word, ``facts`` what is known of the model, ``config`` the same as a ModelConfig (None
    while a size that every model has is unknown), ``missing_facts`` what neither the files nor the user told,
    ``notes`` what is odd, ``remarks`` what was assumed or is not understood in a sidecar, ``left_out`` arrays that are
    known and not converted, by kind.
    """

    path: Path
    word: Word
    source: Source
    facts: Facts
    config: ModelConfig | None
    build_table: Callable[[ModelConfig], Table]
    root: Path
    version: str | None = None
    step: int | None = None
    manifest: Manifest | None = None
    sidecar: Mapping[str, Any] | None = None  # config.json or params.json as read
    missing_facts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    left_out: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)  # sidecar files that the checkpoint holds inside (GGUF)

    @property
    def layout(self) -> str:
        """The layout's name."""
        return self.word.name

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every stored array."""
        return self.source.tensors

    def known_config(self) -> ModelConfig:
        """The config, or MissingFact naming the sizes that are unknown."""
        if self.config is None:
            sizes = [name for name in self.missing_facts if self.facts.get(name) is None and name in SIZES]
            raise MissingFact(
                f"{self.path}: the {self.layout} layout does not tell {', '.join(sizes)}; give "
                "--model-config FILE|PRESET (a config.json, a params.json or a preset's name)"
                + (", or --num-of-head and --head-dim" if self.layout == "te" else "")
            )
        return self.config

    @cached_property
    def table(self) -> Table:
        """The layout's rows for this model. Raises MissingFact where the layout word lacks a needed key."""
        return self.build_table(self.known_config())

    @cached_property
    def restore(self) -> dict[str, np.dtype]:
        """Weight name -> the dtype that it had before an earlier conversion widened it, if it has not changed since."""
        if self.manifest is None or not self.manifest.restore:
            return {}
        before = self.manifest.restore
        slots = {b.slot: b for b in self.table.bind(self.known_config()) if before.keys() & set(b.names.values())}
        same = unchanged(self.manifest, self.source, {slot: (b.key, b.index) for slot, b in slots.items()})
        if len(same) < len(slots):
            self.notes.append(
                f"{len(slots) - len(same)} norm scales changed since the manifest was written; they stay as they are "
                "stored, not as the manifest says they were"
            )
        return {name: before[name] for slot in same for name in slots[slot].names.values() if name in before}

    @cached_property
    def bounds(self) -> list[Bound]:
        """Every slot of the files, checked against the table. Raises PlanError with everything that does not fit."""
        bounds, problems = check_source(self.table, self.known_config(), self.tensors)
        if problems:
            raise PlanError(f"{self.path}: not a whole {self.layout} checkpoint: {len(problems)} problems", problems)
        return bounds

    @cached_property
    def remainders(self) -> dict[str, np.ndarray]:
        """Slot -> what rounding took from it in an earlier conversion, where the array is still the same."""
        if self.manifest is None or not self.manifest.remainders:
            return {}
        rests = self.manifest.remainders
        slots = {bound.slot: (bound.key, bound.index) for bound in self.bounds if bound.slot in rests}
        same = unchanged(self.manifest, self.source, slots)
        same = {slot for slot in same if list(rests[slot].shape) == self.manifest.tensors[slot]["shape"]}
        if changed := [slot for slot in slots if slot not in same]:
            self.notes.append(
                f"{len(changed)} arrays changed since the manifest was written (first: {changed[0]}); "
                "their recorded rounding remainders are not used"
            )
        return {slot: rests[slot] for slot in slots if slot in same}

    @cached_property
    def _givers(self) -> dict[str, tuple[Bound, ...]]:
        out: dict[str, list[Bound]] = {}
        for bound in self.bounds:
            for name in bound.names.values():
                out.setdefault(name, []).append(bound)
        return {name: tuple(bounds) for name, bounds in out.items()}

    def weight(self, name: str) -> np.ndarray:
        """One canonical weight (``llmtool.params``), canonical axes, rope HALVES, plain norm scales.

        A lazy view into the mapped files where the layout stores the weight plainly; slicing it reads only the slice.
        """
        first, *others = sorted(self._givers[name], key=lambda bound: bound.row.copy_of is not None)
        del others  # a second copy is compared when the checkpoint is converted or verified, not on every read
        return read_weight((first,), name, self.source, self.table, params.sizes(self.known_config()), self.remainders)

    def weight_dtype(self, name: str) -> np.dtype:
        """The dtype of a weight as stored, or as it was before a layout widened it."""
        return self.restore.get(name, self.tensors[self._givers[name][0].key].dtype)

    def describe(self) -> dict[str, Any]:
        """What ``llmtool inspect`` shows, as JSON values (schema llmtool.inspect/1)."""
        from llmtool.convert.sidecars.tokenizer_files import vocabulary_size

        odd = list(self.notes)
        if self.config is not None:
            try:
                odd += check_source(self.table, self.config, self.tensors)[1]
            except MissingFact as error:
                odd.append(str(error))
            entries = vocabulary_size(self.root) if self.root.is_dir() else None
            if entries is not None and entries != self.config.vocab_size:
                odd.append(f"the tokenizer has {entries} entries, the embedding {self.config.vocab_size}")
        weights = {key: spec for key, spec in self.tensors.items() if not self._carries_nothing(key)}
        dtypes = Counter(str(spec.dtype) for spec in weights.values())
        return {
            "schema": "llmtool.inspect/1",
            "path": str(self.path),
            "layout": self.layout,
            "word": str(self.word),
            "version": self.version,
            "step": self.step,
            "family": self.facts.get("family"),
            "config": self.config.to_json() if self.config else {k: v for k, v in self.facts.items() if v is not None},
            "parameters": sum(spec.size for spec in weights.values()),
            "dtypes": dict(dtypes.most_common()),
            "bytes": sum(spec.nbytes for spec in weights.values()),
            "tensors": [
                {"name": key, "shape": list(spec.shape), "dtype": str(spec.dtype)} for key, spec in weights.items()
            ],
            "left_out": dict(self.left_out),
            "manifest": self.manifest is not None,
            "missing_facts": list(self.missing_facts),
            "notes": list(self.remarks),
            "odd": odd,
        }

    def _carries_nothing(self, key: str) -> bool:
        """Whether an array is no weight: a step counter, optimizer state, a buffer of old files."""
        try:
            return self.table.is_ignored(key)
        except MissingFact:  # no table yet: of the layouts that lack facts, only Pax has other arrays
            return key == "step" or key.startswith("opt_states")

    def close(self) -> None:
        """Unmap the files."""
        self.source.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
