#!/usr/bin/env bash
# One GPU: what must be true. First, beside each other, what no clock looks at: device tests, compute-sanitizer over them,
# parity in 16 bits beside Hugging Face's own, and long runs: whole trajectories against the reference in f32, two
# deterministic runs, fp16 against bf16, moments in fewer bits. Then, alone, speed side by side with PyTorch, and the
# driver's own figure of memory; everything offloaded side by side with ColossalAI and DeepSpeed.
# Usage: truth.sh CARRIED, a folder with castor, cuda_device, trajectory, cuda_rates, shared, peers, wheels, text.txt.gz;
# PARTS chooses from tests sanitize parity runs speed offload; TESTS names device tests for the sanitizer; logs go to $OUT.
set -u
PARTS=${PARTS:-tests sanitize parity runs speed}
carried=$1 castor=$1/castor out=${OUT:-/tmp/out}
. "$(dirname "$0")/common.sh"
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
random_tokens
if [ -d "$carried/wheels" ]; then
  bash "$carried/peers/cases.sh" install "$carried/wheels" >/dev/null 2>&1
  part offload && bash "$carried/peers/cases.sh" warm
fi
if part tests; then
  say "== device tests"; timeout 100 "$carried/cuda_device" >"$out/device_tests.txt" 2>&1; grep -E "FAILED|passed|skipped" "$out/device_tests.txt" | tee -a "$summary"
fi
if part sanitize; then
  (cd /tmp && timeout "${SANITIZE:-230}" "$sanitizer" --tool memcheck --error-exitcode 9 "$OLDPWD/$carried/cuda_device" ${TESTS:-} >"$out/memcheck.txt" 2>&1; echo "exit $?" >>"$out/memcheck.txt") &
  (cd /tmp && timeout "${SANITIZE:-230}" "$sanitizer" --tool racecheck --error-exitcode 9 "$OLDPWD/$carried/cuda_device" ${TESTS:-} >"$out/racecheck.txt" 2>&1; echo "exit $?" >>"$out/racecheck.txt") &
fi
if part parity; then
  for case in "$carried"/shared/golden/*/ "$carried"/shared/cases/model_oracle/*/; do
    for precision in bf16 fp16; do
      [ -f "$case/expect.safetensors" ] || continue
      timeout 30 "$castor" parity --backend cuda --model "$case" --batch "$case/batch.safetensors" --expect "$case/expect.safetensors" \
        --mixed_precision $precision --tolerance 1e-2 >"$out/parity.log" 2>&1
      say "parity $(basename "$case") $precision: exit $? $(grep -iE "worst" "$out/parity.log" | cut -c1-160)"
    done
  done
  timeout 100 python3 "$(dirname "$0")/bf16_reference.py" "$carried"/shared/golden/*/ 2>"$out/reference.log" | sed 's/^/   Hugging Face: /' | tee -a "$summary"
fi
if part runs; then
  gunzip -c "$carried/text.txt.gz" >/tmp/text.txt
  # The tests look for the cases where the repository they were built in has them.
  root=$(strings "$carried/trajectory" | grep -o '/[^ ]*/trainer/../../shared' | head -1); root=${root%/trainer/../../shared}
  mkdir -p "$root/trainer" && ln -sfn "$PWD/$carried/shared" "$root/../shared"
  text() { # name, then flags: a run on real text
    local name=$1; shift
    timeout 230 "$castor" train --backend cuda --data /tmp/text.txt --tokenizer bytes --eval_fraction 0 --logging_steps 1 \
    --output_dir "/tmp/runs/$name" "$@" >"$out/text_$name.log" 2>&1 || say "$name: exit $?: $(grep error "$out/text_$name.log" | cut -c1-200)"
  }
  (CASTOR_TEST_BACKEND=cuda timeout 230 "$carried/trajectory" --test-threads 1 golden_ trajectories_ placement_ >"$out/trajectory.txt" 2>&1) &
  small="--config configs/smollm2-135m.json --max_length 512 --batch_size 4 --mixed_precision bf16"
  (for twice in 1 2; do text "same_$twice" $small --max_steps 30 --lr 3e-4; done) &
  article="--config configs/article-4block.json --max_length 1024 --batch_size 4 --max_steps 200 --lr 1e-4 --warmup_steps 20 --no_save_model"
  (text article_bf16 $article --mixed_precision bf16; text article_fp16 $article --mixed_precision fp16) &
  moments="$small --max_steps 2000 --lr 3e-4 --warmup_steps 100 --lr_scheduler_type cosine --no_save_model"
  (for states in fp32 bf16 8bit; do text "moments_$states" $moments --optimizer_states $states; done) &
fi
wait
if part sanitize; then
  for tool in memcheck racecheck; do say "$tool: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|passed|exit' "$out/$tool.txt" | tr '\n' ' ' | cut -c1-250)"; done
fi
if part runs; then
  say "== trajectories in f32"; grep -E "^test |test result|panicked|instead of" "$out/trajectory.txt" | cut -c1-200 | tee -a "$summary"
  say "== same bits twice: $(sha256sum /tmp/runs/same_*/model/model*.safetensors | cut -c1-16 | tr '\n' ' ')"
  python3 - <<'P' | tee -a "$summary"
import json, math
def steps(name):
    try: return [x for x in map(json.loads, open(f'/tmp/runs/{name}/train_log.jsonl')) if x.get('kind') == 'step']
    except Exception as e: return []
a, b = steps('same_1'), steps('same_2')
print('   losses and norms of 30 steps equal:', bool(a) and [(x['loss'], x['grad_norm']) for x in a] == [(x['loss'], x['grad_norm']) for x in b])
mean = lambda xs: sum(xs) / max(len(xs), 1)
for names in (('article_bf16', 'article_fp16'), ('moments_fp32', 'moments_bf16', 'moments_8bit')):
    for name in names:
        s = [x['loss'] for x in steps(name)]
        if s: print(f'   {name}: {len(s)} steps, loss of the first {s[0]:.4f}, mean of the last 20 % {mean(s[-len(s)//5:]):.4f}')
P
  tail -n 3 "$out"/text_*.log >"$out/text_tails.txt"; rm -f "$out"/text_*.log
fi
if part speed; then
  say "== rates kept"; timeout 60 "$castor" doctor --bench 2>&1 | grep -E "FLOP|B/s" | tee -a "$summary"
  one="--backend cuda --batch_size 8 --warmup_steps_memory 4"
  GRADIENTS=fp16 LIMIT=60 train article_fp16 $one --config configs/article-4block.json --mixed_precision fp16 --max_steps 30
  GRADIENTS=fp16 LIMIT=60 train article_fp16_free $one --config configs/article-4block.json --mixed_precision fp16 --max_steps 30 --no_deterministic
  LIMIT=60 train 1b3_free $one --config configs/castor-1.3b.json --mixed_precision bf16 --max_steps 20 --no_deterministic
  (while sleep 0.3; do nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits; done >/tmp/used.txt) & poll=$!
  LIMIT=90 train 7b_free $one --config configs/llama2-7b.json --mixed_precision bf16 --max_steps 10 --no_deterministic
  kill $poll; say "driver's figure, MiB: $(sort -n /tmp/used.txt | tail -1)"; grep -h "Max CUDA" "$out/train.txt" | tail -1 | tee -a "$summary"
  LIMIT=100 SOFT=40 STEPS=6 bash "$carried/peers/cases.sh" ${PEERS-A-7b-compile A-1b3-best} 2>&1 | cut -c1-300 | tee -a "$summary"
fi
if part offload; then
  bash "$carried/peers/cases.sh" waitwarm >/dev/null 2>&1
  LIMIT=60 train 1b3_offload --backend cuda --config configs/castor-1.3b.json --mixed_precision bf16 --batch_size 8 --gradient_accumulation_steps 2 --plugin gemini_cpu --max_steps 12
  LIMIT=100 SOFT=40 STEPS=5 bash "$carried/peers/cases.sh" C-1b3-off16 B-1b3-z3-off 2>&1 | cut -c1-420 | tee -a "$summary"
fi
