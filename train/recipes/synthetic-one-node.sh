#!/usr/bin/env bash
# How fast is one node of eight GPUs? Steps on made-up rows: sequences/s, tokens/s, TFLOP/s a GPU, MFU, memory.
#
#   CONFIG=synthetic-llama2-7b MESH=fsdp=8 OPTIONS="--batch-per-device 2" train/recipes/synthetic-one-node.sh
set -euo pipefail
CONFIG=${CONFIG:-synthetic-gpt-126m}
MESH=${MESH:-data=8}
STEPS=${STEPS:-20}
OPTIONS=${OPTIONS:-}   # --json for a file, --attention xla or cudnn, --remat …

# shellcheck disable=SC2086  # OPTIONS is a list of words
llmtool pretrain --config "$CONFIG" --benchmark --steps "$STEPS" --mesh "$MESH" $OPTIONS
