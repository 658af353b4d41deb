"""The foreign samples as cases, and the any-to-any matrix over them: ``make matrix`` prints it.

Every sample converts to every layout that can hold its model, and back, without a bit changed; what a layout cannot
hold is refused by name.
"""

import dataclasses
import shutil
import sys
import tempfile
from pathlib import Path

from llmtool.convert import convert_checkpoint, diff_checkpoints, open_checkpoint
from llmtool.errors import LlmtoolError, PlanError
from llmtool.model_config import ModelConfig

ORACLE = Path(__file__).parent / "fixtures" / "oracle"
HEADS = {"n_heads": 4, "head_dim": 4}  # of every sample; a TE folder does not tell
LLAMA = {"norm_eps": 1e-5, "rope_theta": 10000.0}  # what Pax folders lack
GPT = {"norm_eps": 1e-5}

# sample -> (what --from must say, facts that its files lack)
SAMPLES: dict[str, tuple[str | None, dict[str, object]]] = {
    "hf_llama_gqa": (None, {}),
    "hf_llama_mha_tied": (None, {}),
    "hf_gpt2": (None, {}),
    "hf_gptneox": (None, {}),
    "hf_mixtral": (None, {}),
    "meta_llama2_gqa_mp1": (None, {}),
    "meta_llama2_gqa_mp2": (None, {}),
    "meta_llama3_gqa_mp2": (None, {}),
    "meta_llama2_gqa_mp1_hf": (None, {}),
    "meta_llama2_gqa_mp2_hf": (None, {}),
    "meta_llama3_gqa_mp2_hf": (None, {}),
    "meta_llama2_gqa_mp2_saxml": (None, LLAMA),
    "meta_llama3_gqa_mp2_saxml": (None, LLAMA | {"rope_theta": 500000.0}),
    "pax_llama_mha": (None, LLAMA),
    "pax_llama_mha_repeat": (None, LLAMA),
    "pax_llama_gqa": (None, LLAMA),
    "pax_llama_gqa_repeat": (None, LLAMA),
    "pax_llama_gqa_weightsonly": (None, LLAMA),
    "pax_gpt": (None, GPT),
    "pax_gpt_repeat": (None, GPT),
    "pax_gpt_sinusoid": (None, GPT | {"position": "sinusoidal"}),
    "pax_gpt_sepemb": (None, GPT),
    "pax_glam": (None, {"norm_eps": 1e-6}),
    "nv_gpt_te_back": (None, GPT),
    "nv_gpt_te": ("te", GPT),
    "nv_gpt_repeat_te": ("te", GPT),
    "nv_gpt_split_te_skipbias": ("te", GPT),
    "nv_llama_mha_te": ("te:gate=linear_first", LLAMA),
    "nv_llama_mha_te_chunk": ("te:gate=linear_first", LLAMA),
    "nv_llama_gqa_te": ("te:gate=linear_first", LLAMA),
    "nv_saxml_f16": ("te:gate=linear_first", LLAMA),
}
# every variant that a target has; what does not fit a model is refused by name
TARGETS = (
    "hf", "hf:shard_size=4KB", "meta", "meta:shards=2,split=width", "meta:shards=2,split=vocab", "native",
    "pax", "pax:repeat", "pax:qkv=split", "pax:rope=half", "pax:repeat,qkv=split,rope=half", "pax:norm=direct",
    "pax:format=flat", "pax:format=bare,chunk=8",
    "te", "te:repeat", "te:qkv=kv_packed", "te:qkv=separate", "te:gate=linear_first",
    "te:repeat,rope=half,qkv=separate",
    "te:bias=pax", "te:ln=pax", "te:format=bare,chunk=8",
)  # fmt: skip


def sample_config(name: str) -> ModelConfig:
    """All facts of a sample: what its files tell and what this table adds."""
    word, facts = SAMPLES[name]
    heads = HEADS if word else None
    with open_checkpoint(ORACLE / name, layout=word, expected=heads) as checkpoint:
        return dataclasses.replace(checkpoint.known_config(), **facts)


def there_and_back(name: str, to: str, folder: Path) -> str:
    """Convert a sample to a layout and back to its own; "equal", or the refusal. Anything else is an AssertionError."""
    word, _ = SAMPLES[name]
    config = sample_config(name)
    source, there, back = ORACLE / name, folder / "there", folder / "back"
    try:
        convert_checkpoint(source, there, to=to, from_=word, model_config=config)
    except LlmtoolError as error:
        assert not there.exists(), "a refused conversion left something behind"
        return f"refused: {error}"
    assert diff_checkpoints(source, there, layout_a=word, model_config=config).equal
    with open_checkpoint(source, layout=word, model_config=config) as checkpoint:
        origin = str(checkpoint.word)
        dtypes = {spec.dtype for key, spec in checkpoint.tensors.items() if key.startswith("mdl_vars")}
    own = origin.split(":")[0]
    convert_checkpoint(there, back, to=origin if own in ("pax", "te") else own)
    diff = diff_checkpoints(source, back, layout_a=word, model_config=config)
    assert diff.equal and diff.max_abs_diff == 0, diff.to_json()
    if len(dtypes) < 2:  # a sample of mixed dtypes widens where a layout packs two of them into one array
        assert not diff.dtypes, diff.dtypes
    return "equal"


def main() -> int:
    """Print the matrix; exit 1 if any cell is neither equal nor refused."""
    bad = 0
    for name in SAMPLES:
        cells = []
        for to in TARGETS:
            folder = Path(tempfile.mkdtemp())
            try:
                cell = there_and_back(name, to, folder)
            except (AssertionError, PlanError) as error:
                bad += 1
                cell = f"FAILED {error}"
            finally:
                shutil.rmtree(folder)
            cells.append("=" if cell == "equal" else "-" if cell.startswith("refused") else "X")
            if "-v" in sys.argv or cell.startswith("FAILED"):
                print(f"  {name} -> {to}: {cell}")
        print(f"{name:28}", " ".join(cells))
    print("\ncolumns:", *TARGETS, sep="\n  ")
    print("= there and back bit for bit   - refused by name   X failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
