"""params.json of Meta's releases and our :class:`ModelConfig`, one into the other.

Meta's file gives the feed-forward width only through a rounding rule, and what it does not give (context length, the
ids of BOS and EOS) is taken from the preset whose sizes these are, with a note. Source of names, rule and defaults:
``ModelArgs`` and ``FeedForward`` of meta-llama/llama, llama3 and llama-models.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from llmtool import presets
from llmtool.convert.sidecars.json_file import MOST_PARTS, Fields, model_of, unknown, width_of_a_head
from llmtool.errors import CannotHold, Contradiction, MissingFact
from llmtool.model_config import ModelConfig, RopeScaling

MAPPED = frozenset(("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size", "multiple_of",
                    "ffn_dim_multiplier", "norm_eps", "rope_theta", "use_scaled_rope", "rope_scaling_factor"))
IGNORED: Mapping[str, str] = {
    "max_batch_size": "how a program runs the model, not what it computes",
    "max_seq_len": "the memory a program reserves, not what the model can do",
    "model_parallel_size": "the shards are counted in the files",
    "use_kv_cache": "how a program runs the model, not what it computes",
    "sliding_window": "must be null",
}
_REFUSED = {
    "moe": "experts", "sliding_window": "a sliding window", "quantization": "quantised weights",
    "quantization_args": "quantised weights", "lora_args": "adapters beside the weights",
    "vision_chunk_size": "a vision tower", "vision_encoder": "a vision tower",
}
_MULTIPLE, _EPS, _THETA, _FACTOR = 256, 1e-5, 1e4, 8.0  # Meta's code where params.json is silent; theta: Llama 1 and 2
_OUTSIDE = ("max_positions", "bos_id", "eos_id", "pad_id")  # facts without a place in params.json that change no weight


def ffn_width(d_model: int, multiple_of: int, multiplier: float | None) -> int:
    """Meta's rule: 2/3 of 4 D, times the multiplier, each truncated, rounded up to a multiple."""
    hidden = int(2 * (4 * d_model) / 3)
    if multiplier is not None:
        hidden = int(multiplier * hidden)
    return multiple_of * -(-hidden // multiple_of)


def config_from_params(data: Mapping[str, Any], where: str, *, d_ff: int | None, vocab_size: int | None,
                       notes: list[str] | None = None) -> ModelConfig:
    """The model that a params.json describes.

    ``d_ff`` and ``vocab_size`` are rows of w1 and of the embedding, where the weights are there to be asked; they win
    over a rule and over -1, but a number of the file that differs from them is a Contradiction. What was assumed and
    what was not understood is appended to ``notes``.
    """
    notes = [] if notes is None else notes
    fields = Fields(data, where)
    fields = fields.object("model") or fields
    for key, meaning in _REFUSED.items():
        if fields.data.get(key) is not None:
            raise CannotHold(f"{where}: {key} means {meaning}, which a Meta checkpoint of llmtool does not have")
    fields.need("dim", "n_layers", "n_heads")
    d_model, n_heads = fields.count("dim") or 0, fields.count("n_heads") or 0

    assumed = []
    if (eps := fields.number("norm_eps")) is None:
        eps = _EPS
        assumed.append(f"norm_eps ({eps:g}, as in Meta's code)")
    if (theta := fields.number("rope_theta")) is None:
        theta = _THETA
        assumed.append(f"rope_theta ({theta:g}, as in Llama 1 and 2)")
    factor = fields.number("rope_scaling_factor")
    scaling = None
    if fields.flag("use_scaled_rope"):
        if factor is None:
            factor = _FACTOR
            assumed.append(f"the factor of its scaled rope ({factor:g}, as in Meta's code; Hugging Face's config.json "
                           "of Llama 3.2 says 32)")
        scaling = RopeScaling(factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    config = model_of(dict(
        family="llama", vocab_size=_vocab_size(fields, vocab_size), d_model=d_model,
        n_layers=fields.count("n_layers", MOST_PARTS), n_heads=n_heads,
        n_kv_heads=fields.count("n_kv_heads") or n_heads,
        head_dim=fields.count("head_dim") or width_of_a_head(d_model, n_heads, where),
        d_ff=_ffn_width(fields, d_ff, d_model), norm="rmsnorm", gated=True, position="rope", tied=False, norm_eps=eps,
        activation="silu", rope_theta=theta, rope_scaling=scaling), where)
    if name := presets.of_the_sizes_of(config):
        known = presets.preset(name)
        config = dataclasses.replace(config, **{field: getattr(known, field) for field in _OUTSIDE})
        assumed.append(f"context length ({known.max_positions}), BOS ({known.bos_id}) and EOS ({known.eos_id}): those "
                       f"of {name}, whose sizes it has")
    if assumed:
        notes.append(f"{where}: does not say {'; '.join(assumed)}")
    if strange := unknown_fields(data):
        notes.append(f"{where}: fields that are not understood and stay behind: {', '.join(strange)}")
    return config


def _ffn_width(fields: Fields, found: int | None, d_model: int) -> int:
    """Rows of w1; ``hidden_dim`` and the rule are cross-checks where the file states them, else the source."""
    stated = fields.count("hidden_dim")
    multiple, multiplier = fields.count("multiple_of"), fields.number("ffn_dim_multiplier", most=1e6)
    by_rule = ffn_width(d_model, multiple or _MULTIPLE, multiplier)
    says_rule = multiple is not None or multiplier is not None
    for value, how in ((stated, f"hidden_dim is {stated}"),
                       (by_rule if says_rule else None,
                        f"multiple_of {multiple or _MULTIPLE} and ffn_dim_multiplier {multiplier} give {by_rule}")):
        if value is not None and found is not None and value != found:
            raise Contradiction(f"{fields.where}: {how}, but w1 has {found} rows; correct params.json, or give "
                                "--model-config FILE|PRESET")
    return found or stated or by_rule


def _vocab_size(fields: Fields, found: int | None) -> int:
    """Rows of the embedding; the file's own number must agree, unless it is -1, the tokenizer's business."""
    stated = None if fields.data.get("vocab_size") == -1 else fields.count("vocab_size")
    if stated is not None and found is not None and stated != found:
        raise Contradiction(f"{fields.where}: vocab_size is {stated}, but the embedding has {found} rows; correct "
                            "params.json, or give --model-config FILE|PRESET")
    if stated is None and found is None:
        raise MissingFact(f"{fields.where}: does not say vocab_size (it is absent or -1) and there is no embedding to "
                          "count; write the number there, or give --model-config FILE|PRESET")
    return stated or found or 0


def unknown_fields(data: Mapping[str, Any]) -> list[str]:
    """Keys of a params.json that are neither mapped nor declared ignored."""
    nested = data.get("model")
    outside = unknown(data, ("model",)) if isinstance(nested, Mapping) else []
    return outside + unknown(nested if isinstance(nested, Mapping) else data, MAPPED, IGNORED)


def params_from_config(config: ModelConfig, base: Mapping[str, Any] | None = None,
                       notes: list[str] | None = None) -> dict[str, Any]:
    """params.json of a model; raises CannotHold naming each fact that it cannot say.

    ``base`` is the source's own params.json where it had one: its unknown keys and its rounding rule are kept. Keys
    that the code of Llama 1 and 2 refuses are written only where needed. A tied model stays whole: Meta's files hold a
    copy of the embedding as the output matrix. Facts without a place there are named in ``notes``.
    """
    if config.family != "llama":
        raise CannotHold(f"a params.json describes Llama models only, not {config.family}; choose another layout")
    config.require("norm_eps", "rope_theta", "activation", why="params.json")
    base = dict(base.get("model") or base) if base else {}
    multiple, multiplier = _rule_for(config.d_model, config.d_ff, base)
    out: dict[str, Any] = {"dim": config.d_model, "n_layers": config.n_layers, "n_heads": config.n_heads}
    if config.n_kv_heads != config.n_heads or "n_kv_heads" in base:
        out["n_kv_heads"] = config.n_kv_heads
    out |= {"vocab_size": config.vocab_size, "multiple_of": multiple}
    if multiplier is not None:
        out["ffn_dim_multiplier"] = multiplier
    out["norm_eps"] = config.norm_eps
    if config.rope_theta != _THETA or config.rope_scaling or "rope_theta" in base:
        out["rope_theta"] = config.rope_theta
    if config.rope_scaling:
        out["use_scaled_rope"] = True
        if config.rope_scaling.factor != _FACTOR:
            out["rope_scaling_factor"] = config.rope_scaling.factor
    out = {key: out.get(key, value) for key, value in base.items() if key in out or key not in MAPPED} | out

    read_back = config_from_params(out, "the params.json to write", d_ff=None, vocab_size=None)
    differing = {field.name: (want, got) for field in dataclasses.fields(config)
                 if (want := getattr(config, field.name)) != (got := getattr(read_back, field.name))}
    differing.pop("tied", None)
    silent = [f"{name} {differing.pop(name)[0]!r}" for name in _OUTSIDE if name in differing]
    if differing:
        raise CannotHold("a params.json cannot say " + "; ".join(
            f"{name} {want!r} (it would mean {got!r})" for name, (want, got) in differing.items())
            + "; choose another target layout")
    if silent and notes is not None:
        notes.append(f"params.json has no place for {', '.join(silent)}")
    return out


def _rule_for(d_model: int, d_ff: int, base: Mapping[str, Any]) -> tuple[int, float | None]:
    """(multiple_of, ffn_dim_multiplier) whose rule gives ``d_ff``: the source's own, else Meta's usual, else any."""
    for multiple, multiplier in _candidates(d_model, d_ff, base):
        if ffn_width(d_model, multiple, multiplier) == d_ff:
            return multiple, multiplier
    return 1, (d_ff + 0.5) / int(2 * (4 * d_model) / 3)  # truncates to d_ff whatever the last bit


def _candidates(d_model: int, d_ff: int, base: Mapping[str, Any]) -> Iterator[tuple[int, float | None]]:
    fields = Fields(base, "params.json")
    if (multiple := fields.count("multiple_of")) is not None:
        yield multiple, fields.number("ffn_dim_multiplier", most=1e6)
    yield _MULTIPLE, None
    yield from ((256, 1.5), (4096, 1.3), (1024, 1.3), (4096, 1.2))  # 3.2 1B, 70B, 8B, 405B
    powers = [1 << bit for bit in reversed(range(13)) if d_ff % (1 << bit) == 0]
    yield from ((multiple, None) for multiple in powers)
    low = max(1, d_ff - int(2 * (4 * d_model) / 3))  # a multiple that rounds up by at least this much
    yield from ((multiple, None) for multiple in range(low, min(d_ff, 4096) + 1) if d_ff % multiple == 0)
    ratio = d_ff / int(2 * (4 * d_model) / 3)
    yield from ((multiple, round(ratio, digits)) for digits in range(1, 8) for multiple in powers
                if round(ratio, digits) > 0)
