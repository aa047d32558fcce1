#!/usr/bin/env bash
# Online LRU's modes on copying, a small variant for a processor core: 10 symbols of 32, 2 layers of width 32, 600 steps.
# Usage: results/copying-online/run.sh [FOLDER]
set -euo pipefail
folder=${1:-runs/copying-online}
for seed in 0 1 2; do
    for arm in bptt full 1truncated spatial; do
        learner=(--learner online_lru --learner-args "mode=$arm" --update sequence)
        if [ "$arm" = bptt ]; then learner=(--learner bptt); fi
        linrec train copying --task.length 5 --task.n-copied 10 --task.n-symbols 32 --task.no-fresh --task.n-train 20000 \
            --model.mixer lru --model.mixer-args.d-state 32 --model.d-model 32 --model.n-layers 2 \
            --model.channel-mixing glu --model.d-channel-mixing 32 \
            --optim.lr 0.003 --optim.transition-lr 0.0015 --optim.weight-decay 0 --optim.warmup-steps 0 --optim.clip-norm None \
            --loop.steps 600 --loop.batch-size 50 --loop.device cpu --loop.eval-every 600 --loop.keep last \
            "${learner[@]}" --loop.seed "$seed" --out "$folder/$arm-$seed"
    done
done
linrec report --collect "$folder" --out results/copying-online
