#!/usr/bin/env bash
# Meta's Llama 2 70B (8 files, consolidated.00.pth … .07.pth) into a Pax checkpoint for paxml's LLaMA70B.
#
#   SRC=Llama-2-70b DST=llama2-70b-pax convert/recipes/meta-to-pax-llama2-70b.sh
#
# Disk: 138 GB beside the source. Memory: a few GB, whatever the model's size. 7B and 13B: the same command.
set -euo pipefail
SRC=${SRC:-Llama-2-70b}
DST=${DST:-llama2-70b-pax}
TO=${TO:-pax}            # pax:repeat for a model with stacked layers (USE_REPEATED_LAYER)

llmtool inspect "$SRC"
llmtool convert "$SRC" "$DST" --to "$TO"
llmtool diff "$SRC" "$DST"
