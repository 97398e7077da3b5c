#!/usr/bin/env bash
# One GPU: what is there, every operator against the CPU, rates, parity, and short training runs.
# Usage: first.sh CASTOR_BINARY DEVICE_TESTS RATES SHARED_CASES; logs go to $OUT.
set -u
castor=$1 tests=$2 rates=$3 shared=$4 out=${OUT:-/tmp/out}
. "$(dirname "$0")/common.sh"

say "== doctor"; "$castor" doctor >"$out/doctor.txt" 2>&1; grep -i -E "cuda|cudnn|nccl|cublas|nvrtc" "$out/doctor.txt" | cut -c1-160 | tee -a "$summary"
say "== device tests"; timeout 150 "$tests" >"$out/device_tests.txt" 2>&1; grep -E "FAILED|passed|skipped" "$out/device_tests.txt" | tee -a "$summary"
say "== rates"; timeout 90 "$rates" >"$out/rates.txt" 2>&1; tail -n 60 "$out/rates.txt" | tee -a "$summary"
say "== parity"
for case in mha gqa_tied llama3_rope; do
  g=$shared/golden/$case
  for precision in no bf16 fp16; do
    tolerance=1e-4; [ $precision = no ] || tolerance=3e-2
    timeout 30 "$castor" parity --backend cuda --model "$g" --batch "$g/batch.safetensors" --expect "$g/expect.safetensors" \
      --mixed_precision $precision --tolerance $tolerance >"$out/parity_${case}_$precision.txt" 2>&1
    say "parity $case $precision: exit $? $(grep -i worst "$out/parity_${case}_$precision.txt") $(grep error "$out/parity_${case}_$precision.txt" | cut -c1-200)"
  done
done
cat "$out"/parity_*.txt >"$out/parity.txt"; rm -f "$out"/parity_*_*.txt

random_tokens
say "== train"
train article_fp16 --backend cuda --max_steps 10 --config configs/article-4block.json --mixed_precision fp16 --batch_size 8 --recompute selective
train 1b3_bf16 --backend cuda --max_steps 10 --config configs/castor-1.3b.json --mixed_precision bf16 --batch_size 8 --recompute selective
train 7b_bf16 --backend cuda --max_steps 10 --config configs/llama2-7b.json --mixed_precision bf16 --batch_size 8 --plugin gemini_cuda
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader | tee -a "$summary"
