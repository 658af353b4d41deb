"""The tokenizer inside a GGUF file as files of Hugging Face: tokenizer, its config, generation config.

Two kinds: byte-level BPE ("gpt2"), whose merges are there but whose way of cutting text into words is only named, and
SentencePiece BPE ("llama"), whose merges follow from the scores. Source: the tokenizer keys of the ``gguf`` package;
the patterns of words are those of the models that llama.cpp names them after.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmtool.convert.sidecars.json_file import Fields, dump_json
from llmtool.errors import BadCheckpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _CONTROL, _USER, _BYTE = 1, 3, 4, 6  # token types of llama.cpp
_MARK = "\u2581"  # SentencePiece's space
_LONGEST_PIECE = 1024  # characters; each place where a piece can be cut is looked at
_CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
           r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_GPT2, _DIGITS = "GPT-2's words", "each digit alone, then GPT-2's words"
# tokenizer.ggml.pre: how text is cut into words, a regular expression or one of the above
_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "roberta-bpe"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe"),
                    _CL100K.replace("DIGITS", "{1,3}")),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), _CL100K.replace("DIGITS", "")),
}
_LLAMA3 = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3"))  # whole words first; BOS unless told otherwise
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}  # their spelling


def tokenizer_from_gguf(fields: Mapping[str, Any], notes: list[str] | None = None) -> dict[str, bytes]:
    """The files to write beside a checkpoint, by name; empty, with the reason in ``notes``, for a kind we cannot build.

    ``fields`` are the metadata as plain values. Raises BadCheckpoint for tokens, types, scores or merges that do not
    fit one another.
    """
    notes = [] if notes is None else notes
    fields_ = Fields(fields, "the tokenizer of the GGUF")
    kind = fields_.text("tokenizer.ggml.model")
    out = _generation(fields_)
    if kind is None:
        notes.append("the GGUF holds no tokenizer")
        return out
    if kind not in ("gpt2", "llama"):
        notes.append(f"a GGUF tokenizer of the kind {kind!r} cannot be written as tokenizer.json; take the original's")
        return out
    tokens = _strings(fields_, "tokenizer.ggml.tokens")
    if len(set(tokens)) < len(tokens) or not tokens:
        raise BadCheckpoint(f"{fields_.where}: lists {'a token twice' if tokens else 'no token'}")
    types = _column(fields_, "token_type", len(tokens), int) or [_NORMAL] * len(tokens)
    tokenizer = (_byte_level if kind == "gpt2" else _sentencepiece)(fields_, tokens, types, notes)
    if tokenizer is None:
        return out
    special = _special_tokens(fields_, tokens)
    add = {name: _adds(fields_, name, kind) for name in ("bos", "eos")}
    _add_tokens(tokenizer, tokens, types, special)
    _frame(tokenizer, fields_, special, add)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": token for name, (token, _) in special.items()},
        "add_bos_token": add["bos"], "add_eos_token": add["eos"],
        "add_prefix_space": kind == "llama" and fields_.flag("tokenizer.ggml.add_space_prefix") is not False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields_.count(f"{fields_.text('general.architecture')}.context_length"),
        "chat_template": fields_.text("tokenizer.chat_template"),
    }
    known = {key: value for key, value in config.items() if value is not None}
    return {"tokenizer.json": tokenizer.to_str(pretty=True).encode(), "tokenizer_config.json": dump_json(known), **out}


def _generation(fields: Fields) -> dict[str, bytes]:
    ids = {f"{name}_token_id": fields.token_ids(f"tokenizer.ggml.{_SPECIAL[name]}_token_id") for name in
           ("bos", "eos", "pad")}
    turn = fields.token_ids("tokenizer.ggml.eot_token_id")
    if turn is not None and turn != ids["eos_token_id"]:
        ids["eos_token_id"] = [i for i in (ids["eos_token_id"], turn) if i is not None]  # type: ignore[assignment]
    known = {key: value for key, value in ids.items() if value is not None}
    return {"generation_config.json": dump_json(known)} if known else {}


def _byte_level(fields: Fields, tokens: list[str], types: list[int], notes: list[str]) -> "Tokenizer | None":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if "tokenizer.ggml.merges" not in fields.data:
        notes.append("the GGUF's byte-level tokenizer has no merges, so no tokenizer.json was written")
        return None
    pre = fields.text("tokenizer.ggml.pre")
    if pre not in _WORDS:
        name = "does not say how it cuts text into words" if pre in (None, "default") else f"cuts words as {pre!r}"
        notes.append(f"the GGUF's tokenizer {name}: tokenizer.json uses GPT-2's words; check it against the original")
    words = _WORDS.get(pre or "", _GPT2)
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in
                                                   _strings(fields, "tokenizer.ggml.merges"))]
    if bad := next((pair for pair in merges if not {*pair, "".join(pair)} <= ids.keys()), None):
        raise BadCheckpoint(f"{fields.where}: merges {bad[0]!r} and {bad[1]!r}, which it does not list as tokens")
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre in _LLAMA3))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words in (_GPT2, _DIGITS))]
    if words == _DIGITS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif words != _GPT2:
        steps.insert(0, pre_tokenizers.Split(Regex(words), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Fields, tokens: list[str], types: list[int], notes: list[str]) -> "Tokenizer | None":
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _column(fields, "scores", len(tokens), float)
    if scores is None or fields.data.get("tokenizer.ggml.precompiled_charsmap"):
        what = "no scores" if scores is None else "rules that rewrite text"
        notes.append(f"the GGUF's SentencePiece tokenizer has {what}: no tokenizer.json; take the original's")
        return None
    if max(map(len, tokens)) > _LONGEST_PIECE:
        raise BadCheckpoint(f"{fields.where}: has a token of more than {_LONGEST_PIECE} characters")
    ids = {token: i for i, token in enumerate(tokens)}
    # SentencePiece joins the pair whose piece scores highest; among equals, long pieces keep runs of spaces whole
    splits = sorted(
        (-scores[i], -cut, -(len(token) - cut), i)
        for i, token in enumerate(tokens) if types[i] == _NORMAL
        for cut in range(1, len(token)) if token[:cut] in ids and token[cut:] in ids)
    merges = [(tokens[i][:-minus], tokens[i][-minus:]) for _, minus, _, i in splits]
    unknown = fields.token_ids("tokenizer.ggml.unknown_token_id")
    model = models.BPE(vocab=ids, merges=merges, fuse_unk=True,
                       byte_fallback=any(kind == _BYTE for kind in types),
                       unk_token=tokens[unknown] if isinstance(unknown, int) and unknown < len(tokens) else None)
    tokenizer = Tokenizer(model)
    prefix = fields.flag("tokenizer.ggml.add_space_prefix") is not False
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_MARK)] * prefix + [normalizers.Replace(" ", _MARK)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()] + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer


def _add_tokens(tokenizer: "Tokenizer", tokens: list[str], types: list[int],
                special: dict[str, tuple[str, int]]) -> None:
    """Control tokens, and those with a role, are matched before any word is cut; so are user-defined ones."""
    from tokenizers import AddedToken

    control = {i for i, kind in enumerate(types) if kind == _CONTROL} | {number for _, number in special.values()}
    user = [i for i, kind in enumerate(types) if kind == _USER and i not in control]
    tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in sorted(control)])
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False) for i in user])


def _frame(tokenizer: "Tokenizer", fields: Fields, special: dict[str, tuple[str, int]], add: dict[str, bool]) -> None:
    """Put BOS before and EOS after a text where the file asks for it."""
    from tokenizers import processors

    used = [name for name, wanted in add.items() if wanted]
    if missing := [name for name in used if name not in special]:
        raise BadCheckpoint(f"{fields.where}: wants {' and '.join(missing)} added to a text, but has no such token")
    before, after = ([special[name][0]] if name in used else [] for name in ("bos", "eos"))
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=list(dict.fromkeys(special[name] for name in used)))


def _adds(fields: Fields, name: str, kind: str) -> bool:
    """Whether a token is added to every text: as the file says, else as llama.cpp takes it for this kind."""
    told = fields.flag(f"tokenizer.ggml.add_{name}_token")
    return told if told is not None else name == "bos" and (
        kind == "llama" or fields.text("tokenizer.ggml.pre") in _LLAMA3)


def _special_tokens(fields: Fields, tokens: list[str]) -> dict[str, tuple[str, int]]:
    """Role: (token, id), for the roles that the file gives."""
    out = {}
    for role, spelling in _SPECIAL.items():
        number = fields.token_ids(f"tokenizer.ggml.{spelling}_token_id")
        if number is None:
            continue
        if not isinstance(number, int) or number >= len(tokens):
            raise BadCheckpoint(f"{fields.where}: the {spelling} token is {number}, but there are {len(tokens)} tokens")
        out[role] = (tokens[number], number)
    return out


def _strings(fields: Fields, key: str) -> list[str]:
    value = fields.data.get(key)
    if not isinstance(value, list) or not all(type(item) is str for item in value):
        raise BadCheckpoint(f"{fields.where}: {key} is not a list of strings")
    return value


def _column(fields: Fields, name: str, rows: int, kind: type) -> list[Any] | None:
    """A list with one number a token, or None where it is absent."""
    value = fields.data.get(f"tokenizer.ggml.{name}")
    if value is not None and (not isinstance(value, list) or len(value) != rows or
                              not all(type(item) in (int, kind) and item == item for item in value)):
        raise BadCheckpoint(f"{fields.where}: tokenizer.ggml.{name} is no list of {rows} numbers, one a token")
    return value
