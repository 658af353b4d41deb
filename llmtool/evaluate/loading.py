"""A checkpoint on its devices, with its tokenizer: what every evaluation starts from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jax.sharding import Mesh

from llmtool.convert import open_checkpoint
from llmtool.convert.checkpoint import Checkpoint
from llmtool.errors import Contradiction
from llmtool.evaluate.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from llmtool.model.decoder import check_forward
from llmtool.model.load import load_params
from llmtool.model.mesh import make_mesh
from llmtool.model_config import ModelConfig

Told = Callable[[str, int, int], None]  # stage, done, of how much


@dataclass
class Model:
    """An open checkpoint that can be run. Nothing but headers is read until :meth:`params`."""

    checkpoint: Checkpoint
    config: ModelConfig
    mesh: Mesh | None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        layout: str | None = None,
        model_config: str | ModelConfig | None = None,
        step: int | None = None,
        expected: Mapping[str, Any] | None = None,
        mesh: str | Mesh | None = None,
    ) -> "Model":
        """Open from headers, and check that everything a forward pass needs is there and known.

        ``mesh``: a shape, or left out: the one device there is, or all of them as ``fsdp``.
        """
        checkpoint = open_checkpoint(path, layout=layout, model_config=model_config, step=step, expected=expected)
        try:
            config = checkpoint.known_config()
            check_forward(config)
            checkpoint.bounds  # noqa: B018  every problem of the files at once, before any value is read
            if not isinstance(mesh, Mesh):
                mesh = make_mesh(mesh) if mesh or jax.device_count() > 1 else None
        except BaseException:
            checkpoint.close()
            raise
        return cls(checkpoint, config, mesh)

    def tokenizer(self, path: str | Path | None) -> Tokenizer:
        """The tokenizer in ``path``, or beside the checkpoint; one that does not fit the embedding is refused."""
        beside = self.checkpoint.path if self.checkpoint.layout == "gguf" else self.checkpoint.root
        tokenizer = load_tokenizer(path or beside)
        check_vocabulary(tokenizer, self.config)
        return tokenizer

    def max_length(self, asked: int | None) -> int | None:
        """Positions to read at most: what is asked for, else the model's own context length; None if not known."""
        longest = self.config.max_positions
        if asked is None or longest is None:
            return asked or longest
        if asked > longest and self.config.position == "learned":
            raise Contradiction(f"--max-length {asked}: the model has learned {longest} positions, and no more")
        return asked

    def params(self, dtype: str, told: Told = lambda stage, done, total: None) -> Mapping[str, Any]:
        """The weights in ``dtype`` on the devices, each process reading its own share."""
        done, total = 0, sum(spec.nbytes for spec in self.checkpoint.tensors.values())

        def on_read(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            told("loading", done, total)

        return load_params(self.checkpoint, self.config, self.mesh, dtype, on_read)

    def __enter__(self) -> "Model":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.checkpoint.close()
