#!/usr/bin/env bash
# LAMBADA and BoolQ on one machine: its CPU, or all of its GPUs. Any layout.
#
#   CKPT=Llama-2-7b DTYPE=bfloat16 evaluate/recipes/one-machine.sh
#
# The items' results are kept; a run that was broken off goes on from them when it is started again.
set -euo pipefail
CKPT=${CKPT:-Llama-2-7b}
OUT=${OUT:-results}
DTYPE=${DTYPE:-float32}      # bfloat16: half the memory, and faster
PROTOCOL=${PROTOCOL:-lm-eval}  # pax: what Pax's own evaluation reports
LAMBADA=${LAMBADA:-$(llmtool data get lambada)}
BOOLQ=${BOOLQ:-$(llmtool data get boolq)}
OPTIONS=${OPTIONS:-}         # such as: --limit 200, --tokenizer FILE, --model-config FILE

mkdir -p "$OUT"
# shellcheck disable=SC2086  # OPTIONS is a list of words
llmtool eval lambada --ckpt "$CKPT" --data "$LAMBADA" --dtype "$DTYPE" --protocol "$PROTOCOL" \
    --output "$OUT/lambada.jsonl" $OPTIONS
# shellcheck disable=SC2086
llmtool eval boolq --ckpt "$CKPT" --data "$BOOLQ" --dtype "$DTYPE" --protocol "$PROTOCOL" \
    --output "$OUT/boolq.jsonl" $OPTIONS
