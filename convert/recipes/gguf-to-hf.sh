#!/usr/bin/env bash
# A GGUF file into a folder that transformers loads. Quantised tensors become float32; DTYPE=bfloat16 halves the result.
#
#   SRC=model.gguf DST=model-hf convert/recipes/gguf-to-hf.sh
set -euo pipefail
SRC=${SRC:-model.gguf}
DST=${DST:-model-hf}
DTYPE=${DTYPE:-float32}
TOLERANCE=${TOLERANCE:-0}   # a cast changes values: say how far they may move (bfloat16: 2^-9 of the largest)

llmtool convert "$SRC" "$DST" --to hf --dtype "$DTYPE"
llmtool diff "$SRC" "$DST" --tolerance "$TOLERANCE"
