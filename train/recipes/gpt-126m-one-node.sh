#!/usr/bin/env bash
# GPT 126 M on one node of eight GPUs: the preset's batch of 256 rows a step, an eighth of it at a time.
#
#   DATA=tokens/ OUT=runs/126m train/recipes/gpt-126m-one-node.sh
#
# DATA: what `llmtool data tokenize` wrote, or text (then TOKENIZER too). Started again, it goes on where it stopped.
set -euo pipefail
DATA=${DATA:-tokens}
OUT=${OUT:-runs/gpt-126m}
MESH=${MESH:-data=8}
TOKENIZER=${TOKENIZER:-}
OPTIONS=${OPTIONS:-}   # such as: --validation jsonl:held-out.jsonl.zst --lambada lambada.jsonl --lambada-every 5000

# shellcheck disable=SC2086  # OPTIONS is a list of words
llmtool pretrain --config gpt-126m --data "$DATA" ${TOKENIZER:+--tokenizer "$TOKENIZER"} --out "$OUT" --resume \
    --mesh "$MESH" --grad-accum 8 $OPTIONS
