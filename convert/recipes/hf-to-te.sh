#!/usr/bin/env bash
# A Hugging Face Llama into a Pax checkpoint whose layers are Transformer Engine's.
#
#   SRC=Llama-2-7b-hf DST=llama2-7b-te convert/recipes/hf-to-te.sh
#
# GATE: act_first for Transformer Engine 1.8 and newer, linear_first for 1.6 and older.
set -euo pipefail
SRC=${SRC:-Llama-2-7b-hf}
DST=${DST:-llama2-7b-te}
GATE=${GATE:-act_first}

llmtool convert "$SRC" "$DST" --to "te:gate=$GATE"
llmtool diff "$SRC" "$DST"
