#!/usr/bin/env bash
# One GPU: device tests, rates, the three models of the issue with the planner free, and models beyond the GPU.
# Usage: speed.sh CASTOR_BINARY DEVICE_TESTS RATES; logs go to $OUT.
set -u
castor=$1 tests=$2 rates=$3 out=${OUT:-/tmp/out}
. "$(dirname "$0")/common.sh"
random_tokens
[ -x "$tests" ] && { say "== device tests"; timeout 120 "$tests" >"$out/device_tests.txt" 2>&1; grep -E "FAILED|passed|skipped" "$out/device_tests.txt" | tee -a "$summary"; }
[ -x "$rates" ] && { say "== rates"; timeout 70 "$rates" >"$out/rates.txt" 2>&1; grep -E "x[0-9]+ |GB/s|adamw|rmsnorm|sum|swiglu| 128 | 64 " "$out/rates.txt" | tee -a "$summary"; }
one="--backend cuda --batch_size 8 --warmup_steps_memory 4"
train article_fp16 $one --config configs/article-4block.json --mixed_precision fp16 --max_steps 20
train 1b3 $one --config configs/castor-1.3b.json --mixed_precision bf16 --max_steps 20
train 7b $one --config configs/llama2-7b.json --mixed_precision bf16 --max_steps 10
train 7b_64k_host $one --config configs/llama2-7b.json --mixed_precision bf16 --gradient_accumulation_steps 4 --max_steps 4 --plugin gemini_cpu --recompute full
train 13b_64k $one --config configs/llama2-13b.json --mixed_precision bf16 --gradient_accumulation_steps 4 --max_steps 3
LIMIT=170 train 30b_8bit --backend cuda --config configs/castor-30b.json --mixed_precision bf16 --batch_size 4 --gradient_accumulation_steps 2 --max_steps 3 --optimizer_states 8bit
