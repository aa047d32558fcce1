#!/usr/bin/env bash
# Does a curriculum teach associative retrieval? Recurrent Memory Transformer with the sizes, updates and batches of the
# suite `segments`, whose sequences are of one segment for 1,500 steps, of two for 1,500 more, and then of three:
#
#     results/segment-curriculum/run.sh OUT [OPTIONS OF linrec bench queue ...]
#
# `linrec report --collect OUT --out results/segment-curriculum` makes the table that is kept here.
set -euo pipefail

out=${1:?"usage: $0 OUT [OPTIONS OF linrec bench queue ...]"}

for seed in 0 1 2; do
  echo "seed-$seed segment-copy --task.kind associative --model.mixer attention --model.memory.kind recurrent_memory" \
    "--model.memory.segment-length 24 --model.d-channel-mixing 261 --loop.curriculum 1500 24 1500 48" \
    "--loop.steps 5000 --loop.seed $seed"
done | sed -E 's/(\S+) (.*)/[\1]\ncommand = train \2\nminutes = 5/' |
  linrec bench queue /dev/stdin --folder "$out" --minutes 600 --per-gpu 3 "${@:2}"

linrec report "$out"/*/ --out "$out/report"
