#!/usr/bin/env bash
# Shakespeare by character: four token mixers at equal parameters and equal tokens, and HGRN's ablations of its tables
# 8, 10 and 11 at that size; three seeds each, spread over the GPUs of this machine, with a report of each group:
#
#     results/shakespeare-char/run.sh TEXT OUT [OPTIONS OF linrec bench queue ...]
#
# `linrec report --collect OUT/mixers OUT/ablations --out results/shakespeare-char` makes the table that is kept here.
#
# TEXT is the file that nanoGPT downloads, 1,115,394 characters.
# All have a budget of 5,000 steps; each ends when the validation loss has not fallen for 1,000, since all models know
# the text by heart long before, and the best one of the validation split is what nanoGPT reports too.
set -euo pipefail

text=${1:?"usage: $0 TEXT OUT [OPTIONS OF linrec bench queue ...]"}
out=${2:?"usage: $0 TEXT OUT [OPTIONS OF linrec bench queue ...]"}

# 10.7 million parameters each: what a mixer has less than another, the channel mixing has more
declare -A mixers=(
  [gateloop]="--model.d-channel-mixing 960"
  [hgrn]="--model.mixer hgru --model.d-channel-mixing 960"
  [lru]="--model.mixer lru --model.d-channel-mixing 1536"
  [transformer]="--model.mixer attention --model.mixer-args.n-heads 6 --model.mixer-args.dropout 0.2
                 --model.d-channel-mixing 1536"
)
declare -A ablations=(
  [lru-forget-gate]="--model.mixer lru --model.mixer-args.forget-gate --model.d-channel-mixing 1344"
  [no-forget-gate]="--model.mixer hgru --model.mixer-args.forget-gate none"
  [only-lower-bound]="--model.mixer hgru --model.mixer-args.forget-gate bound"
  [no-lower-bound]="--model.mixer hgru --model.mixer-args.lower-bound 0.0"
  [random-lower-bound]="--model.mixer hgru --model.mixer-args.lower-bound random"
  [decreasing-lower-bound]="--model.mixer hgru --model.mixer-args.lower-bound decreasing"
  [no-phase]="--model.mixer hgru --model.mixer-args.phase none"
  [all-real]="--model.mixer hgru --model.mixer-args.phase none --model.mixer-args.no-complex-input"
  [data-dependent-phase]="--model.mixer hgru --model.mixer-args.phase data"
)

runs() { # FOLDER RECIPE OPTIONS, a line each
  local name seed
  for seed in 0 1 2; do
    for name in "${!mixers[@]}"; do
      echo "mixers/$name-$seed shakespeare-char --data.path $text --loop.patience 4 --loop.seed $seed" ${mixers[$name]}
    done
    for name in "${!ablations[@]}"; do
      echo "ablations/$name-$seed shakespeare-char --data.path $text --loop.patience 4 --loop.seed $seed" ${ablations[$name]}
    done
  done
}

# tokenised once, before many runs want to do so at the same time
[ -e "$out/first/result.json" ] ||
  linrec train shakespeare-char --data.path "$text" --loop.steps 1 --optim.warmup-steps 0 --loop.compile off \
    --out "$out/first"
runs | sed -E 's/(\S+) (.*)/[\1]\ncommand = train \2\nminutes = 5/' |
  linrec bench queue /dev/stdin --folder "$out" --minutes 600 --per-gpu 3 "${@:3}"

linrec report "$out/mixers"/*/ --out "$out/mixers-report"
linrec report "$out/mixers"/hgrn-*/ "$out/mixers"/lru-*/ "$out/ablations"/*/ --out "$out/ablations-report"
