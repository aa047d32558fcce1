#!/usr/bin/env bash
# What is a memory worth? Transformer-XL on windows and segments of 64 characters, with memories of 0 to 256 steps that
# pass from batch to batch: six layers, 2.0M parameters at every length, three seeds, 5,000 steps with batches of 64:
#
#     results/shakespeare-carried/run.sh TEXT OUT [OPTIONS OF linrec bench queue ...]
#
# `linrec report --collect OUT --out results/shakespeare-carried` makes the table that is kept here.
#
# TEXT is the file that nanoGPT downloads, 1,115,394 characters.
set -euo pipefail

text=${1:?"usage: $0 TEXT OUT [OPTIONS OF linrec bench queue ...]"}
out=${2:?"usage: $0 TEXT OUT [OPTIONS OF linrec bench queue ...]"}

for seed in 0 1 2; do
  for memory in 0 16 32 64 128 256; do
    echo "memory-$memory-$seed shakespeare-char --data.path $text --data.length 64 --model.mixer transformer_xl" \
      "--model.mixer-args.segment-length 64 --model.mixer-args.memory-length $memory --model.d-model 184" \
      "--model.d-channel-mixing 436 --loop.carry-state --loop.seed $seed"
  done
done | sed -E 's/(\S+) (.*)/[\1]\ncommand = train \2\nminutes = 5/' |
  linrec bench queue /dev/stdin --folder "$out" --minutes 600 --per-gpu 3 "${@:3}"

linrec report "$out"/*/ --out "$out/report"
