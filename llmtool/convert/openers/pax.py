"""Open a Pax checkpoint, with plain Pax layers or Transformer Engine's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtool.convert.checkpoint import Checkpoint
from llmtool.convert.facts import Facts, resolve
from llmtool.convert.layout_word import Word, parse_word
from llmtool.convert.layouts import te
from llmtool.convert.layouts.pax_facts import pax_facts, te_widths
from llmtool.convert.layouts.pax_glam import pax_table
from llmtool.convert.manifest import Manifest, manifest_of
from llmtool.convert.pax_folder import PaxFolder, find_step
from llmtool.convert.row import Table
from llmtool.convert.stores.base import Source
from llmtool.convert.stores.zarr import ZarrSource
from llmtool.errors import Contradiction, MissingFact, UnknownLayout
from llmtool.model_config import ModelConfig

LLAMA_ROPE = "the LLaMA configs of praxis and saxml turn pairs side by side (say pax:rope=half for the others)"

# What the configs of each family have in common and no array shows.
ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "llama": {"activation": "silu", "position": "rope"},
    "gpt": {"activation": "gelu_tanh"},
    "gpt_neox": {"activation": "gelu"},
    "glam": {
        "activation": "gelu_tanh",
        "expert_activation": "relu",
        "position": "t5",
        "experts_per_token": 2,
        "relative_max_distance": 128,
        "extra_softmax_logit": True,
        "scale_query": False,
        "scale_logits": True,
    },
}


def open_pax(
    path: Path, folder: PaxFolder, word: Word | None, told: Facts | None, expected: Mapping[str, Any]
) -> Checkpoint:
    """Headers and facts of one step of a Pax checkpoint. ``word``: what the user says of the layout, if anything."""
    source = ZarrSource(folder.state, folder.unpadded)
    name, shown, found = pax_facts(source.tensors, str(folder.state))
    if word is not None and word.name != name:
        raise UnknownLayout(f"{path}: holds {name} layers, but --from says {word.name}")
    manifest = manifest_of(folder.root, source.tensors)
    shown["format"] = folder.format
    if found["family"] == "gpt" and any(
        known.get("family") == "gpt_neox" for known in (told or {}, vars(manifest.model) if manifest else {})
    ):
        found["family"] = "gpt_neox"  # the same variables: only a config tells
    options, notes = _options(name, shown, word, manifest, found, str(path))
    if name == "te":
        found |= _heads(source, found, told, expected, manifest, str(path))
    facts = resolve(
        str(folder.state),
        found,
        told=told,
        expected=expected,
        recorded=manifest.model if manifest else None,
        assumed=ASSUMED[found["family"]],
        whose=f"Pax's {found['family']} configs",
    )
    if facts.facts.get("position") == "rope" and "rope" not in {**(word.options if word else {})} and manifest is None:
        notes.append(f"rope=interleaved assumed: {LLAMA_ROPE}")
    if facts.facts.get("position") not in ("rope", None):
        del options["rope"]  # nothing to order
    keys = list(source.tensors)
    moments = sum(".m.params." in key or ".v.params." in key for key in keys if key.startswith("opt_states"))
    counts = sum(key.startswith("opt_states") for key in keys) - moments
    missing = list(facts.missing)
    if name == "te" and found.get("gated") and "gate" not in options:
        missing.append("gate order (te:gate=act_first|linear_first)")
    return Checkpoint(
        path=path,
        word=Word(name, options),
        source=source,
        facts=facts.facts,
        config=facts.config,
        root=folder.root,
        build_table=lambda config: _table(name, config, options, str(path)),
        manifest=manifest,
        version=None if folder.version is None else str(folder.version),
        step=folder.step,
        missing_facts=missing,
        notes=list(folder.notes),
        remarks=[*notes, *facts.notes],
        left_out={k: n for k, n in {"optimizer moments": moments, "optimizer counts": counts}.items() if n},
    )


def _options(
    name: str, shown: dict[str, str], word: Word | None, manifest: Manifest | None, found: Facts, where: str
) -> tuple[dict[str, str], list[str]]:
    """The layout's keys: shown by the arrays, said by the user, recorded by a manifest, or the layout's default."""
    options, notes = dict((word or Word(name)).found(where, **shown).options), []
    if manifest is not None and (recorded := parse_word(manifest.layout)).name == name:
        for key in ("rope", "norm", "gate"):
            if key in recorded.options:
                if word is not None and word.options.get(key, recorded.options[key]) != recorded.options[key]:
                    notes.append(f"{key}={word.options[key]} was asked for; the manifest says {recorded.options[key]}")
                options.setdefault(key, recorded.options[key])
    options.setdefault("rope", "half" if found["family"] == "gpt_neox" else "interleaved")
    options.setdefault("norm", "centred" if found["norm"] == "layernorm" else "direct")
    return options, notes


def _heads(
    source: Source,
    found: Facts,
    told: Facts | None,
    expected: Mapping[str, Any],
    manifest: Manifest | None,
    where: str,
) -> Facts:
    """Heads of a TE folder, whose kernels are flat: from the number or size of heads that somebody else knows."""
    n_h, k_h = te_widths(source.tensors)
    known = {
        "the flags": dict(expected),
        "the model config given": told or {},
        "the manifest": vars(manifest.model) if manifest else {},
    }
    n, h = (_agreed(name, known, where) for name in ("n_heads", "head_dim"))
    if n_h is None or k_h is None or (n is None and h is None):
        return {}
    h = h if h is not None else n_h // (n or 1)
    if n_h % h or k_h % h or n_h // h != (n or n_h // h):
        raise Contradiction(
            f"{where}: queries are {n_h} features wide and keys {k_h}; {n or '?'} heads of {h} do not fit"
        )
    return {"n_heads": n_h // h, "n_kv_heads": k_h // h, "head_dim": h}


def _agreed(name: str, known: Mapping[str, Mapping[str, Any]], where: str) -> int | None:
    """A fact that several may know: its value, None if nobody does, a Contradiction if they differ."""
    values = {source: facts[name] for source, facts in known.items() if facts.get(name)}
    if len(set(values.values())) > 1:
        (one, a), (other, b), *_ = values.items()
        raise Contradiction(f"{where}: {name} is {a} in {one}, but {b} in {other}")
    return next(iter(values.values()), None)


def _table(name: str, config: ModelConfig, options: Mapping[str, str], where: str) -> Table:
    given: dict[str, Any] = {
        "repeat": options["repeat"] == "yes",
        "qkv": options["qkv"],
        "rope": options.get("rope", "interleaved"),
        "norm": options["norm"],
    }
    if name == "pax":
        return pax_table(config, **given)
    if config.gated and "gate" not in options:
        raise MissingFact(
            f"{where}: a gated Transformer Engine folder without a manifest does not say which half of mlp.wi_kernel "
            "is activated; give --from te:gate=linear_first (NVIDIA's converter wrote that) or te:gate=act_first (TE "
            "1.8 and newer compute that)"
        )
    return te.table(config, **given, gate=options.get("gate", "act_first"), bias=options["bias"], ln=options["ln"])


def open_pax_path(
    path: Path, word: Word | None, told: Facts | None, expected: Mapping[str, Any], step: int | None
) -> Checkpoint | None:
    """Open a path that holds a Pax checkpoint, or None if it does not."""
    folder = find_step(path, step)
    return None if folder is None else open_pax(path, folder, word, told, expected)
