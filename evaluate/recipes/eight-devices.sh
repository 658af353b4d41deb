#!/usr/bin/env bash
# One node of eight GPUs: weights and batch split over all of them. 13B in bfloat16 has 3.3 GB of weights a GPU.
#
#   CKPT=Llama-2-13b evaluate/recipes/eight-devices.sh
#
# MESH: `tensor` splits the products (its devices should be neighbours), `fsdp` weights and batch, `data` the batch alone.
set -euo pipefail
CKPT=${CKPT:-Llama-2-13b}
OUT=${OUT:-results}
MESH=${MESH:-data=2,fsdp=2,tensor=2}
LAMBADA=${LAMBADA:-$(llmtool data get lambada)}
BOOLQ=${BOOLQ:-$(llmtool data get boolq)}
OPTIONS=${OPTIONS:-}

mkdir -p "$OUT"
for task in lambada boolq; do
    data=$LAMBADA
    [ "$task" = boolq ] && data=$BOOLQ
    # shellcheck disable=SC2086  # OPTIONS is a list of words
    llmtool eval "$task" --ckpt "$CKPT" --data "$data" --dtype bfloat16 --mesh "$MESH" \
        --output "$OUT/$task.jsonl" $OPTIONS
done
