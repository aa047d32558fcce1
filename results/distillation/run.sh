#!/usr/bin/env bash
# What does distillation cost? A small Hyena of three seeds, 500 steps of shakespeare-char-cpu with a context of 256 and
# filters as long, and its copies with 1 to 64 modes per filter, decoded token by token; ten minutes each on a CPU:
#
#     results/distillation/run.sh TEXT OUT [OPTIONS OF linrec bench queue ...]
#
# `linrec report --collect OUT --out results/distillation` makes the table that is kept here.
#
# TEXT is the file that nanoGPT downloads, 1,115,394 characters.
set -euo pipefail

text=${1:?"usage: $0 TEXT OUT [OPTIONS OF linrec bench queue ...]"}
out=${2:?"usage: $0 TEXT OUT [OPTIONS OF linrec bench queue ...]"}
root=$(dirname "$0")/../..

for seed in 0 1 2; do
  echo "hyena-$seed shakespeare-char-cpu --data.path $text --data.length 256 --loop.steps 500 --loop.seed $seed" \
    "--model.mixer hyena --model.mixer-args.length 256"
done | sed -E 's/(\S+) (.*)/[\1]\ncommand = train \2\nminutes = 5/' |
  linrec bench queue /dev/stdin --folder "$out" --minutes 600 --per-gpu 3 "${@:3}"

for seed in 0 1 2; do
  [ -e "$out/hyena-$seed/extra-distillation.json" ] || python "$root/examples/distillation.py" "$out/hyena-$seed"
done
