#!/usr/bin/env bash
# Both Memory Horizon recipes, both arms, three seeds each; then the tuned recipe without one of its choices at a
# time, one seed each; spread over the GPUs of this machine, with a report of each group:
#
#     results/memory-horizon/run.sh OUT [OPTIONS OF linrec bench queue ...]
#
# `linrec report --collect OUT --out results/memory-horizon` makes the table that is kept here.
set -euo pipefail

out=${1:?"usage: $0 OUT [OPTIONS OF linrec bench queue ...]"}

declare -A without=(
  [open-gates]="--model.mixer-args.gate-bias-init None"
  [output-projection]="--model.mixer-args.no-output-projection"
  [magnitudes]="--model.mixer-args.magnitude-init None"
  [phases]="--model.mixer-args.phase-init 0.314"
  [post-norm]="--model.norm-position pre"
  [muon]="--optim.name adamw --optim.lr 0.006 --optim.transition-lr 0.0006"
  [transition-lr]="--optim.transition-lr 0.008"
  [clipping]="--optim.clip-norm None"
)

runs() { # FOLDER RECIPE OPTIONS, a line each
  for recipe in memory-horizon-tuned memory-horizon; do
    for arm in data fixed; do
      for seed in 0 1 2; do
        echo "$recipe/$arm-$seed $recipe --model.mixer-args.transition $arm --loop.seed $seed"
      done
    done
  done
  for choice in "${!without[@]}"; do
    echo "ablations/without-$choice memory-horizon-tuned ${without[$choice]}"
  done
}

runs | sed -E 's/(\S+) (.*)/[\1]\ncommand = train \2\nminutes = 5/' |
  linrec bench queue /dev/stdin --folder "$out" --minutes 600 --per-gpu 3 "${@:2}"

for recipe in memory-horizon-tuned memory-horizon; do
  linrec report "$out/$recipe"/*/ --out "$out/$recipe-report"
done
linrec report "$out/memory-horizon-tuned/data-0" "$out/ablations"/*/ --out "$out/ablations-report"
