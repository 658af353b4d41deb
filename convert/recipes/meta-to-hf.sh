#!/usr/bin/env bash
# Meta's files (any Llama 1, 2 or 3, any number of shards) into a folder that transformers loads.
#
#   SRC=Meta-Llama-3-8B DST=llama3-8b-hf convert/recipes/meta-to-hf.sh
set -euo pipefail
SRC=${SRC:-Meta-Llama-3-8B}
DST=${DST:-llama3-8b-hf}
SHARD_SIZE=${SHARD_SIZE:-5GB}

llmtool convert "$SRC" "$DST" --to "hf:shard_size=$SHARD_SIZE"
llmtool diff "$SRC" "$DST"
