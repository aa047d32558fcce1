#!/usr/bin/env bash
# Does it learn? Every mixer for 500 steps of shakespeare-char-cpu: 4 layers of width 128, context 64, batch 12; one
# seed, on the CPU, a few minutes each. First those with a matrix state, and what they are compared with; then state-space
# models, long convolutions and gated recurrences:
#
#     results/shakespeare-char-cpu/run.sh TEXT OUT [OPTIONS OF linrec bench queue ...]
#
# `linrec report --collect OUT --out results/shakespeare-char-cpu` makes the table that is kept here.
#
# TEXT is the file that nanoGPT downloads, 1,115,394 characters. Arguments are the defaults of the mixers but where a
# model has positions, a block or a channel mixing of its own; and for SRWM, which in its paper's start learns no more
# than pairs of characters in 500 steps.
set -euo pipefail

text=${1:?"usage: $0 TEXT OUT [OPTIONS OF linrec bench queue ...]"}
out=${2:?"usage: $0 TEXT OUT [OPTIONS OF linrec bench queue ...]"}

runs() { # FOLDER RECIPE OPTIONS, a line each
  while read -r mixer options; do
    echo "$mixer shakespeare-char-cpu --data.path $text --loop.steps 500 --loop.seed 0 --model.mixer $mixer $options"
  done <<'END'
gate_loop
retnet
gla
hgrn2
rwkv6 --model.channel-mixing rwkv --model.embedding-norm
mamba2 --model.channel-mixing none --model.n-layers 8
mlstm --model.channel-mixing none
delta_net
gated_delta_net
linear_attention --model.mixer-args.positions rotary
rfa --model.mixer-args.floor 0.1
decaying_fast_weights --model.mixer-args.gate-bias-init None
trans_normer
rwkv4 --model.channel-mixing rwkv --model.embedding-norm
rwkv5 --model.channel-mixing rwkv --model.embedding-norm
xlstm_7b --model.channel-mixing swiglu
slstm --model.channel-mixing geglu --model.d-channel-mixing 171
aft --model.mixer-args.variant full --model.mixer-args.max-length 64
flash_gau --model.channel-mixing none --model.n-layers 8
recurrent_delta_net
srwm --model.mixer-args.no-input-softmax --model.mixer-args.beta-init 0 --model.mixer-args.init-scale 3 --optim.lr 0.004
relit
gate_loop_attention
hgru
lru
attention --model.mixer-args.n-heads 4
mamba --model.channel-mixing none --model.n-layers 8
s4
s4d
dss
s5
lssl
lmu
h3
gss
dlr
liquid_s4
hyena
sgconv
tnn
mega
rg_lru --model.channel-mixing geglu --model.mixer-args.a-init-of a
hawk --model.mixer-args.a-init-of a
qrnn
sru
gilr
ls_lstm
min_gru
min_lstm
ind_rnn
END
}

runs | sed -E 's/(\S+) (.*)/[\1]\ncommand = train \2\nminutes = 5/' |
  linrec bench queue /dev/stdin --folder "$out" --minutes 600 --per-gpu 3 "${@:3}"
