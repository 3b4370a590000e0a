#!/usr/bin/env bash
# Train under megatron-core's own 1F1B, go on from its checkpoint under ZB-V, and from that one under V-Half. No loss changes:
# losses are those of a training that stays under 1F1B, bit for bit (without clipping, see docs/numerics.md).
#
#   examples/checkpoint_across_schedules.sh [DIRECTORY]     DATA_PATH=path/to/prefix for data of your own, else random tokens
set -euo pipefail
output=$(realpath -m "${1:-runs/across_schedules}")
cd "$(dirname "$0")/.."

model=(
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --global-batch-size 8
    --attention-dropout 0 --hidden-dropout 0 --clip-grad 0 --lr 1e-2 --lr-warmup-iters 2 --train-iters 6 --eval-iters 0
    --tokenizer-type ByteLevelTokenizer --split 100,0,0 --num-workers 0 --log-interval 1 --pipeline-model-parallel-size 2
)
if [ -n "${DATA_PATH:-}" ]; then model+=(--data-path "$DATA_PATH"); else model+=(--mock-data); fi

train() { # SCHEDULE LAST-ITERATION
    python -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py "${model[@]}" --pipeline-schedule "$1" --exit-interval "$2" \
        --load "$output" --save "$output" --metrics "$output/metrics.jsonl"
}

mkdir -p "$output"
train stock 2
train zb-v 4
train v-half 6
