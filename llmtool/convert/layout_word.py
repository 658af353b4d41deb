"""Layout words: ``NAME[:key=value,…]``, the same for source and target, in every command and in the library."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmtool.errors import Contradiction, UnknownLayout


@dataclass(frozen=True)
class Key:
    """One key of a layout word. ``values`` lists what it may be; "number" and "size" stand for their kinds."""

    values: tuple[str, ...]
    default: str
    help: str


YES = ("yes", "no")
_REPEAT = Key(YES, "no", "layers stacked under transformer.repeat, one leading axis (praxis' USE_REPEATED_LAYER)")
_ROPE = Key(
    ("interleaved", "half"),
    "interleaved",
    "order of the head features that rope turns: pairs side by side "
    "(praxis' LLaMARotaryEmbedding, Meta) or in halves (praxis' RotaryPositionalEmbedding, Hugging Face)",
)
_NORM = Key(
    ("centred", "direct"), "centred for layernorm, direct for rmsnorm", "norm scales stored minus one or as they are"
)
_FORMAT = Key(
    ("zarr", "flat", "bare"),
    "zarr",
    "zarr: version 1.1, checkpoints/checkpoint_%08d/{state,metadata}; "
    "flat: version 0, arrays in checkpoint_%08d; bare: arrays in the folder itself",
)
_CHUNK = Key(
    ("number",),
    "none",
    "zarr chunk length along the model dimension of rewritten kernels (NVIDIA's --kernel-chunk-size)",
)


@dataclass(frozen=True)
class LayoutInfo:
    """A layout as ``llmtool layouts`` shows it."""

    name: str
    help: str
    keys: Mapping[str, Key] = field(default_factory=dict)
    writable: bool = True


LAYOUTS: Mapping[str, LayoutInfo] = {
    info.name: info
    for info in (
        LayoutInfo(
            "hf",
            "Hugging Face: safetensors or .bin shards with config.json",
            {
                "shard_size": Key(("size",), "5GB", "largest file written"),
            },
        ),
        LayoutInfo(
            "meta",
            "Meta: consolidated.NN.pth with params.json",
            {
                "shards": Key(("number",), "1", "model-parallel files written"),
                "split": Key(
                    ("width", "vocab"),
                    "vocab for Llama 3 (rope_theta >= 500000), width before",
                    "how ranks share the embedding",
                ),
            },
        ),
        LayoutInfo(
            "pax",
            "Pax: paxml/praxis train state",
            {
                "repeat": _REPEAT,
                "qkv": Key(
                    ("combined", "split"), "combined if kv heads = heads, else split", "q, k, v in one array or three"
                ),
                "rope": _ROPE,
                "norm": _NORM,
                "format": _FORMAT,
                "chunk": _CHUNK,
            },
        ),
        LayoutInfo(
            "te",
            "Transformer Engine layers inside Pax",
            {
                "repeat": _REPEAT,
                "qkv": Key(
                    ("qkv_packed", "kv_packed", "separate"),
                    "qkv_packed if kv heads = heads, else kv_packed",
                    "which projections share a kernel",
                ),
                "gate": Key(
                    ("act_first", "linear_first"),
                    "act_first when written; must be given to read a folder without a manifest",
                    "the activated half of a gated wi_kernel: the first (TE >= 1.8) or the second (NVIDIA's converter)",
                ),
                "rope": _ROPE,
                "norm": _NORM,
                "bias": Key(
                    ("te", "pax", "pax_split"),
                    "te",
                    "pax leaves the layers' biases under their Pax names (NVIDIA's "
                    "--skip-bias), pax_split with those of q, k and v apart",
                ),
                "ln": Key(
                    ("te", "pax"), "te", "pax leaves the layers' norms under their Pax names (NVIDIA's --skip-ln)"
                ),
                "format": _FORMAT,
                "chunk": _CHUNK,
            },
        ),
        LayoutInfo("native", "the trainer's own parameter tree: zarr, restorable by Orbax"),
        LayoutInfo("gguf", "llama.cpp, read only; quantised tensors become float32", writable=False),
    )
}


TARGET_ONLY = ("shard_size", "chunk")  # how much goes into a file: nothing that a source would be asked for


@dataclass(frozen=True)
class Word:
    """A parsed layout word."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        keys = ",".join(f"{key}={self.options[key]}" for key in LAYOUTS[self.name].keys if key in self.options)
        return f"{self.name}:{keys}" if keys else self.name

    def with_(self, **options: str) -> "Word":
        """The word with more keys; keys that it has already stay."""
        return Word(self.name, {**options, **self.options})

    def found(self, where: str, **options: str) -> "Word":
        """The word of a source, with what its files show; a Contradiction where the user said otherwise."""
        for key, value in options.items():
            if self.options.get(key, value) != value:
                raise Contradiction(f"{where}: {key} is {value}, but the layout word says {key}={self.options[key]}")
        said = {key: value for key, value in self.options.items() if key not in (*options, *TARGET_ONLY)}
        return Word(self.name, options | said)

    def number(self, key: str) -> int | None:
        """A whole-number key, or None when it is not given."""
        return int(self.options[key]) if key in self.options else None


def parse_word(text: str) -> Word:
    """Read a layout word; every key and value is checked, and a message names what would have been right."""
    name, _, rest = text.strip().partition(":")
    if name not in LAYOUTS:
        near = difflib.get_close_matches(name, LAYOUTS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownLayout(f"unknown layout {name!r}; known: {', '.join(LAYOUTS)}{hint}")
    options: dict[str, str] = {}
    for item in filter(None, (item.strip() for item in rest.split(","))):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        value = value if equals else "yes"
        if key not in LAYOUTS[name].keys:
            raise UnknownLayout(f"layout {name} has no key {key!r}; it has: {', '.join(LAYOUTS[name].keys) or 'none'}")
        if options.get(key, value) != value:
            raise UnknownLayout(f"{text!r} gives {key} twice: {options[key]} and {value}")
        options[key] = _checked(name, key, value)
    return Word(name, options)


def _checked(name: str, key: str, value: str) -> str:
    values = LAYOUTS[name].keys[key].values
    if values == ("number",):
        good = value.isascii() and value.isdigit() and len(value) < 11 and 0 < int(value) < 1 << 31
        expected = f"a whole number from 1 to {(1 << 31) - 1}"
    elif values == ("size",):
        good, expected = parse_size(value) is not None, "a size such as 5GB, 500MB or 1000000"
    else:
        good, expected = value in values, " or ".join(values)
    if not good:
        raise UnknownLayout(f"{name}:{key}={value[:80]}: expected {expected}")
    return value


def parse_size(text: str) -> int | None:
    """``"5GB"`` -> bytes (decimal units), or None when it is no positive size."""
    number = text.upper().removesuffix("B")
    scale = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.get(number[-1:], 1)
    digits = number if scale == 1 else number[:-1]
    if not digits.isascii() or not digits.isdigit() or not 0 < len(digits) < 16:
        return None
    return int(digits) * scale or None


def describe_layouts() -> list[dict[str, Any]]:
    """The table of layouts, keys, values and defaults, as JSON values."""
    return [
        {
            "name": info.name,
            "help": info.help,
            "read": True,
            "write": info.writable,
            "keys": {
                key: {"values": list(spec.values), "default": spec.default, "help": spec.help}
                for key, spec in info.keys.items()
            },
        }
        for info in LAYOUTS.values()
    ]
