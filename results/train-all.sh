#!/usr/bin/env bash
# Train many runs, spread over the GPUs of this machine; standard input has one run a line:
#
#     FOLDER RECIPE [OPTIONS OF linrec train ...]
#
#     results/train-all.sh OUT [RUNS_PER_GPU] [OPTIONS OF linrec train FOR ALL ...] < runs
#
# A small model leaves most of a large GPU idle, so several runs share one. Each gets the folder OUT/FOLDER and a
# log beside it. A run that was interrupted goes on, and one that has ended is left alone.
set -euo pipefail

out=${1:?"usage: $0 OUT [RUNS_PER_GPU] [OPTIONS OF linrec train ...] < runs"}
per_gpu=${2:-3}
options=("${@:3}")
gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
gpus=$((gpus > 0 ? gpus : 1))

train() { # OUT GPUS FOLDER RECIPE OPTIONS...
  local folder=$1/$3 where
  [ -e "$folder/result.json" ] && return
  where=(--out "$folder")
  [ -e "$folder/config.json" ] && where=(--resume "$folder")
  mkdir -p "$(dirname "$folder")"
  CUDA_VISIBLE_DEVICES=$((SLOT % $2)) linrec train "${@:4}" "${where[@]}" >"$folder.log" 2>&1 ||
    echo "failed: $folder.log" >&2
}
export -f train

# xargs takes a line that ends in a blank together with the next one
sed "s|^|$out $gpus |; s|\$| ${options[*]}|; s| *\$||" |
  xargs -L 1 -P $((gpus * per_gpu)) --process-slot-var=SLOT bash -c 'train "$@"' train
