#!/usr/bin/env bash
# Trains what docs/results/suite.md shows: three seeds of each model, a folder and a page for each question.
#
#   results/suite/run.sh RUNS [WORKERS] [QUESTION ...]
#
# `linrec report --collect RUNS/mad --out results/suite/mad` makes the table of a question.
#
# RUNS is the folder for runs, WORKERS how many jobs share the GPUs, and the questions are the names of the functions
# below, by default those of the last lines. Several questions can be run at a time: the first 97 jobs took 21 minutes on
# two H200, in two sittings, with up to 15 jobs to a GPU; the 108 of `mad` took 6 minutes on four.
set -euo pipefail
runs=${1:?"usage: $0 RUNS [WORKERS] [QUESTION ...]"}
workers=${2:-1}
shift $(($# < 2 ? $# : 2))

suite() { linrec bench "$1" --workers "$workers" --out "$runs/$2" "${@:3}"; }

# transitions that depend on the data, and such that do not
selective-copying() {
  suite recall selective-copying --tasks selective-copying --lrs 0.001 0.003 --mixers mamba gla delta_net s4d lru
}
induction-heads() {
  suite recall induction-heads --tasks induction-heads --lrs 0.001 0.003 --mixers mamba gla delta_net s4d lru
}
# transitions that are complex, negative, or neither
state-tracking() {
  suite state-tracking state-tracking --tasks parity modulo-3 --mixers \
    gate_loop "gate_loop(phase_activation='none')" \
    "delta_net(n_heads=4, beta='double_sigmoid')" "delta_net(n_heads=4)"
}
# states of several sizes, and one that grows
mqar() {
  suite recall mqar --tasks mqar-mixed --mixers \
    attention "delta_net(n_heads=4)" "delta_net(n_heads=16)" "delta_net(n_heads=32)"
}
adding() {
  suite memory adding --tasks adding --lrs 0.003 --mixers hgru "ls_lstm(uniform_init=True)" s4d
}
# the six tasks of MAD
mad() {
  suite mad mad --mixers attention mamba delta_net gate_loop hgru s4d
}
# what holds gate_loop back there
mad-gate-loop() {
  suite mad mad-gate-loop --tasks compression fuzzy-recall selective-copying --parameters 338191 --seeds 0 --mixers \
    "gate_loop(magnitude_init=(0.9, 0.999))" "gate_loop(phase_activation='none')" \
    "gate_loop(phase_activation='none', magnitude_init=(0.9, 0.999))"
}
lstm-task-2b() {
  suite memory lstm-task-2b --tasks lstm-task-2b --mixers "ls_lstm(forget_bias_init=5.0)" hgru mamba s4d
}
# what memories carry from segment to segment; the last model sees all steps
segments() {
  suite segments segments --tasks segment-copy segment-reverse segment-associative --parameters 340000 --mixers \
    "attention@recurrent_memory(segment_length=24)" \
    "attention@recurrent_memory(segment_length=24, detach='segment')" \
    "transformer_xl(segment_length=24, memory_length=12)" "transformer_xl(segment_length=24)" \
    "transformer_xl(segment_length=24, memory_length=48)" \
    "transformer_xl(segment_length=24, memory_length=12)@enhanced_recurrence(segment_length=24)" \
    "compressive_transformer(segment_length=24)" \
    "infini_attention(segment_length=24)" "infini_attention(segment_length=24, update='delta')" \
    "block_recurrent(segment_length=24, n_states=8)" "attention@memformer(segment_length=24)" attention
}
# how far memories carry
segments-far() {
  suite segments segments-far --tasks segment-copy-5 segment-copy-9 --parameters 340000 --mixers \
    "attention@recurrent_memory(segment_length=24)" \
    "attention@recurrent_memory(segment_length=24, detach='segment')" \
    "transformer_xl(segment_length=24, memory_length=48)" "infini_attention(segment_length=24)" \
    "block_recurrent(segment_length=24, n_states=8)" "attention@memformer(segment_length=24)" attention
}
# loss against the length of the memory; SHAKESPEARE is the file of the text
segments-text() {
  suite lm segments-text --tasks shakespeare-char --parameters 2000000 \
    --data "shakespeare-char=${SHAKESPEARE:?"set SHAKESPEARE to the file of the text"}" --mixers \
    "transformer_xl(segment_length=64, memory_length="{0,64,128,192}")"
}

# two time scales
fitzhugh-nagumo() { suite dynamics fitzhugh-nagumo --tasks fitzhugh-nagumo --mixers lem cornn lstm; }
# two marked numbers; `linrec report --collect` takes both folders
adding-2000() {
  suite dynamics adding-2000 --tasks adding-2000 --parameters 102000 --lrs 0.003 --mixers "lem(dt=0.0242)" lstm elman
  suite dynamics adding-2000-faster --tasks adding-2000 --parameters 102000 --lrs 0.02 --mixers \
    "cornn(dt=0.06, gamma=66, epsilon=15)" lstm elman
}
copying-1000() {
  suite dynamics copying-1000 --tasks copying-1000 --parameters 58815 --mixers "exp_rnn(init='henaff')" lstm
}
# parity of events at irregular times
event-xor() {
  local name
  for name in event-xor event-xor-faster; do
    local rate=0.001
    [ "$name" = event-xor ] || rate=0.005
    suite dynamics "$name" --tasks event-xor-dt --parameters 100600 --lrs "$rate" --mixers \
      "cfc(mixed_memory=True)" cfc gru_d
    suite dynamics "$name" --tasks event-xor --parameters 100600 --lrs "$rate" --mixers cfc gru
  done
}
# long sequences, and noise in tests alone; IMAGES is the folder of Fashion-MNIST
permuted-fashion-mnist() {
  suite dynamics permuted-fashion-mnist --tasks permuted-fashion-mnist --parameters 299000 --lrs 0.004 \
    --data "permuted-fashion-mnist=${IMAGES:?"set IMAGES to the folder of Fashion-MNIST"}" --mixers \
    s5 unicornn hgru lipschitz_rnn "noisy_rnn(add_noise=0.05)" "lem(dt=0.31)" lstm \
    "cornn(dt=0.076, gamma=0.4, epsilon=8)"
}

questions=("$@")
((${#questions[@]})) ||
  questions=(selective-copying induction-heads state-tracking mqar adding lstm-task-2b mad mad-gate-loop segments
    segments-far fitzhugh-nagumo adding-2000 copying-1000 event-xor)
for question in "${questions[@]}"; do
  "$question"
done
