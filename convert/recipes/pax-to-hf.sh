#!/usr/bin/env bash
# A Pax checkpoint, out of paxml's training job or of saxml's converter, into a folder that transformers loads.
#
#   SRC=job/checkpoints MODEL_CONFIG=Llama-2-7b-hf/config.json DST=trained-hf convert/recipes/pax-to-hf.sh
#
# Pax folders do not say their rope base nor their norm epsilon: MODEL_CONFIG does. STEP: the newest when left out.
set -euo pipefail
SRC=${SRC:-job/checkpoints}
DST=${DST:-trained-hf}
MODEL_CONFIG=${MODEL_CONFIG:-Llama-2-7b-hf/config.json}
STEP=${STEP:-}

llmtool convert "$SRC" "$DST" --to hf --model-config "$MODEL_CONFIG" --weight-only ${STEP:+--step "$STEP"}
# diff takes the newest step of a job: another is compared by its own folder
if [[ -n "$STEP" ]]; then
    SRC=$(find "$SRC" -maxdepth 2 -name "checkpoint_$(printf %08d "$STEP")" -print -quit)
fi
llmtool diff "$SRC" "$DST" --model-config "$MODEL_CONFIG"
