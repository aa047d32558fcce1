#!/usr/bin/env bash
# Both Memory Horizon recipes, both arms, three seeds each, spread over the GPUs of this machine, and a report of
# each recipe:
#
#     results/memory-horizon/run.sh OUT [RUNS_PER_GPU] [OPTIONS OF linrec train ...]
#
# One run leaves most of a large GPU idle, so several share one. A run that was interrupted goes on.
set -euo pipefail

out=${1:?"usage: $0 OUT [RUNS_PER_GPU] [OPTIONS OF linrec train ...]"}
per_gpu=${2:-3}
options=("${@:3}")
gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
gpus=$((gpus > 0 ? gpus : 1))

train() {
  local folder=$1/$2/$3-$4 device=$((SLOT % $5)) where
  where=(--out "$folder")
  [ -e "$folder/config.json" ] && where=(--resume "$folder")
  mkdir -p "$(dirname "$folder")"
  CUDA_VISIBLE_DEVICES=$device linrec train "$2" --model.mixer-args.transition "$3" --loop.seed "$4" \
    "${where[@]}" "${@:6}" >"$folder.log" 2>&1 || echo "failed: $folder.log" >&2
}
export -f train

for recipe in memory-horizon-tuned memory-horizon; do
  for arm in data fixed; do
    for seed in 0 1 2; do
      echo "$out $recipe $arm $seed $gpus ${options[*]}"
    done
  done
done | xargs -L 1 -P $((gpus * per_gpu)) --process-slot-var=SLOT bash -c 'train "$@"' train

for recipe in memory-horizon-tuned memory-horizon; do
  linrec report "$out/$recipe"/*/ --out "$out/$recipe-report"
done
