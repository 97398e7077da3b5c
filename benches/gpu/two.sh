#!/usr/bin/env bash
# Two GPUs: the same losses as on one, 7B by zero3 and gemini_cuda, the article's table.
# Usage: two.sh CASTOR_BINARY; logs go to $OUT.
set -u
binary=$1 out=${OUT:-/tmp/out}
castor=$binary
. "$(dirname "$0")/common.sh"
random_tokens
nvidia-smi topo -m 2>/dev/null | head -4 | tee -a "$summary"
seven="--backend cuda --config configs/llama2-7b.json --mixed_precision bf16 --batch_size 8 --max_steps 10"
small="--backend cuda --config configs/smollm2-135m.json --max_length 512 --max_steps 5 --no_shuffle --max_steps 5"
LIMIT=60 train eq_1x8 $small --batch_size 8 --plugin ddp
castor="$binary run --nproc_per_node 2"
two() { local name=$1; shift; castor_run "$name" "$@"; }
castor_run() { # as train, through the launcher
  local name=$1 began=$SECONDS; shift
  timeout "${LIMIT:-120}" "$binary" run --nproc_per_node 2 train --data /tmp/random.bin --eval_fraction 0 --max_length 2048 --lr 1e-4 \
    --logging_steps 1 --gradient_dtype bf16 --no_save_model --output_dir "/tmp/runs/$name" "$@" >"$out/train_$name.txt" 2>&1
  say "$name: exit $? in $((SECONDS - began)) s · $(grep -E '^step' "$out/train_$name.txt" | tail -n 1 | cut -c1-150)"
  grep -E "error|panicked|Booster|Max CUDA|train_samples_per_second|The step waited" "$out/train_$name.txt" | cut -c1-250 | tee -a "$summary"
  python3 - "/tmp/runs/$name/train_log.jsonl" <<'P' | tee -a "$summary"
import json, sys
try:
    s = [x for x in map(json.loads, open(sys.argv[1])) if x.get('kind') == 'step']
    print('   losses', [round(x['loss'], 6) for x in s[:5]], 'samples/s, steady', round(sum(x['tokens'] for x in s[2:]) / 2048 / sum(x['seconds'] for x in s[2:]), 3))
except Exception as e:
    print('   no log:', e)
P
  cat "$out/train_$name.txt" >>"$out/train.txt"; rm -f "$out/train_$name.txt"
}
for plugin in ddp zero2 zero3 gemini_cpu; do LIMIT=40 two eq_2x4_$plugin $small --batch_size 4 --plugin $plugin; done
LIMIT=70 two 7b_zero3 $seven --plugin zero3
LIMIT=70 two 7b_gemini_cuda $seven --plugin gemini_cuda
if [ $# -gt 1 ]; then say "== device tests"; timeout 90 "$2" >"$out/device_tests.txt" 2>&1; grep -E "FAILED|passed|skipped" "$out/device_tests.txt" | tee -a "$summary"; fi
castor=$binary
LIMIT=60 train 7b_one $seven --plugin gemini_cuda
LIMIT=100 train 7b_64k_host_48GiB --backend cuda --config configs/llama2-7b.json --mixed_precision bf16 --batch_size 8 --gradient_accumulation_steps 4 --max_steps 4 --plugin gemini_cpu --recompute full --device_memory 48GiB
[ -n "${ARTICLE:-}" ] || exit 0
article="--backend cuda --config configs/article-4block.json --mixed_precision fp16 --grad_checkpoint --max_steps 5"
two article_ddp_plain $article --plugin ddp --no_flash_attention --batch_size 8 --gradient_accumulation_steps 8 --max_steps 3
two article_ddp_flash $article --plugin ddp --batch_size 16 --gradient_accumulation_steps 8
two article_zero2 $article --plugin zero2 --batch_size 12 --gradient_accumulation_steps 32 --max_steps 3
two article_zero3 $article --plugin zero3 --batch_size 12 --gradient_accumulation_steps 8
two article_zero3_offload $article --plugin zero3_offload --batch_size 12 --gradient_accumulation_steps 8
two article_fsdp $article --fsdp "full_shard auto_wrap" --batch_size 2 --gradient_accumulation_steps 8
two article_gemini $article --plugin gemini_cuda --batch_size 28
two article_gemini_plain $article --plugin gemini_cuda --no_flash_attention --batch_size 28 --max_steps 3
