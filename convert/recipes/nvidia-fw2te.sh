#!/usr/bin/env bash
# Pax into Transformer Engine and back, in the spelling of NVIDIA's converter; INPUT is a checkpoint, or its state/.
#
#   INPUT=llama2-7b-pax/checkpoints/checkpoint_00000000/state OUTPUT=llama2-7b-te BACK=llama2-7b-pax-again \
#       convert/recipes/nvidia-fw2te.sh
#
# Sizes are optional; where given (FLAGS="--num-of-layer 32 --num-of-head 32 …") they must agree with the checkpoint.
# The files of a bare folder do not say which half of a gated kernel is activated, so GATE is said on the way back.
set -euo pipefail
INPUT=${INPUT:-llama2-7b-pax/checkpoints/checkpoint_00000000/state}
OUTPUT=${OUTPUT:-llama2-7b-te}
BACK=${BACK:-llama2-7b-pax-again}
FLAGS=${FLAGS:-}
GATE=${GATE:-act_first}   # linear_first: byte for byte what NVIDIA's converter wrote, for Transformer Engine <= 1.6

# shellcheck disable=SC2086  # FLAGS is a list of words
llmtool convert --direction fw2te --fw pax --input-path "$INPUT" --output-path "$OUTPUT" --weight-only \
    --to "te:gate=$GATE" $FLAGS
# shellcheck disable=SC2086
llmtool convert --direction te2fw --fw pax --input-path "$OUTPUT" --output-path "$BACK" --weight-only \
    --from "te:gate=$GATE" $FLAGS
llmtool diff "$INPUT" "$BACK"
