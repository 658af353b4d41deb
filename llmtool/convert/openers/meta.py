"""Open a folder of Meta's ``consolidated*.pth`` with its params.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtool.convert.checkpoint import Checkpoint
from llmtool.convert.facts import Facts, resolve
from llmtool.convert.layout_word import Word
from llmtool.convert.layouts import meta
from llmtool.convert.manifest import manifest_of
from llmtool.convert.row import StoredShapes
from llmtool.convert.sidecars.json_file import Fields, read_json
from llmtool.convert.sidecars.meta_params import config_from_params
from llmtool.convert.sidecars.tokenizer_files import vocabulary_size
from llmtool.convert.stores.absent import AbsentSource
from llmtool.convert.stores.base import DTYPES, TensorSpec
from llmtool.convert.stores.pickled import MetaSource
from llmtool.errors import BadCheckpoint, MissingFact
from llmtool.params import sizes

EMBEDDING, OUTPUT, UP = "tok_embeddings.weight", "output.weight", "layers.0.feed_forward.w3.weight"
ROW_PARALLEL = ("attention.wo.weight", "feed_forward.w2.weight")


def recognises(path: Path) -> bool:
    """Whether a path looks like this layout."""
    return path.is_dir() and (any(path.glob("consolidated*.pth")) or (path / "params.json").is_file())


def open_meta(path: Path, word: Word, told: Facts | None, expected: Mapping[str, Any]) -> Checkpoint:
    """Headers and params of a Meta checkpoint. The files do not say how ranks split the embedding; its shape does."""
    params_path = path / "params.json"
    data = read_json(params_path) if params_path.is_file() else None
    dim = (told or {}).get("d_model")
    if data is not None:
        fields = Fields(data, str(params_path))
        fields = fields.object("model") or fields
        fields.need("dim")
        dim = fields.count("dim")
    if dim is None:
        raise MissingFact(f"{path}: no params.json beside the weights; put it there or give --model-config FILE|PRESET")
    if not any(path.glob("consolidated*.pth")):
        return _without_weights(path, data, word, told, expected)
    axes: dict[str, int | None] = {}
    source = MetaSource(path, lambda key, shapes: axes.setdefault(key, _axis(key, shapes, dim)))
    try:
        vocab_size, _ = source.tensors[EMBEDDING].shape
        d_ff = source.tensors[UP].shape[0]
    except (KeyError, ValueError, IndexError) as error:
        raise BadCheckpoint(
            f"{path}: {EMBEDDING} and {UP} are not two matrices of a Meta checkpoint: {error}"
        ) from error
    found: dict[str, Any] = {}
    notes: list[str] = []
    manifest = manifest_of(path, source.tensors, notes)
    if data is not None:
        found = {**vars(config_from_params(data, str(params_path), d_ff=d_ff, vocab_size=vocab_size, notes=notes))}
        found["tied"] = None
        inner = data["model"] if isinstance(data.get("model"), dict) else data
        found |= {
            name: told[name] for name in ("norm_eps", "rope_theta") if told and name in told and name not in inner
        }
    found |= {"vocab_size": vocab_size, "d_ff": d_ff}
    if OUTPUT not in source.tensors:
        found["tied"] = True
    elif manifest is None and "tied" not in (told or {}):
        found["tied"] = False  # tied models carry a copy of the embedding, which only a manifest or config tells apart
    facts = resolve(
        str(params_path), found, told=told, expected=expected, recorded=manifest.model if manifest else None
    )
    split = "width" if axes.get(EMBEDDING, 1) == 1 else "vocab"
    shown = {"split": split} if source.n_shards > 1 else {}  # one shard: there is nothing to split
    return Checkpoint(
        path=path,
        word=word.found(str(path), shards=str(source.n_shards), **shown).with_(split=split),
        source=source,
        facts=facts.facts,
        config=facts.config,
        root=path,
        build_table=lambda config: meta.table(config, split),
        manifest=manifest,
        sidecar=data,
        missing_facts=facts.missing,
        remarks=notes + facts.notes,
    )


def _without_weights(
    path: Path, data: Mapping[str, Any] | None, word: Word, told: Facts | None, expected: Mapping[str, Any]
) -> Checkpoint:
    """A params.json alone: what the weights would be. A vocabulary of -1 is the tokenizer's, or must be told."""
    notes: list[str] = []
    where = str(path / "params.json")
    vocab_size = (told or {}).get("vocab_size") or vocabulary_size(path)
    found = vars(config_from_params(data or {}, where, d_ff=None, vocab_size=vocab_size, notes=notes))
    facts = resolve(where, found, told=told, expected=expected)
    assert facts.config is not None
    bounds = meta.table(facts.config).bind(facts.config)
    shapes = StoredShapes.of(bounds, sizes(facts.config)).shapes
    tensors = {key: TensorSpec(DTYPES["bfloat16"], shape) for key, shape in shapes.items()}
    return Checkpoint(
        path=path,
        word=word,
        source=AbsentSource(path, tensors, "there is no consolidated.NN.pth"),
        facts=facts.facts,
        config=facts.config,
        root=path,
        build_table=meta.table,
        sidecar=data,
        missing_facts=facts.missing,
        notes=["the weights are not here: shapes follow from params.json"],
        remarks=notes + facts.notes,
    )


def _axis(key: str, shapes: list[tuple[int, ...]], dim: int) -> int | None:
    """The dimension that ranks split. Only the embedding needs its shape for that: whole width means by vocabulary."""
    if key.endswith(ROW_PARALLEL):
        return 1
    if key == EMBEDDING:
        return 0 if shapes[0][-1:] == (dim,) else 1
    return 0 if len(shapes[0]) == 2 else None
