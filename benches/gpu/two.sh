#!/usr/bin/env bash
# Two GPUs: the same losses as on one for every plugin, 7B by zero3 and gemini_cuda beside PyTorch's FSDP2, a killed
# rank, a plan that changes, replica groups and a stopped rank, 70B, and the article's table beside PyTorch's DDP.
# Usage: two.sh CARRIED, a folder with castor, cuda_device and peers; logs go to $OUT.
set -u
PARTS=${PARTS:-equal seven kill article}
carried=$1 castor=$1/castor out=${OUT:-/tmp/out}
. "$(dirname "$0")/common.sh"
export NCCL_NVLS_ENABLE=0
random_tokens
two() { # name, then flags: as train, through the launcher
  local name=$1 began=$SECONDS; shift
  timeout "${LIMIT:-100}" "$castor" run --nproc_per_node 2 train --data /tmp/random.bin --eval_fraction 0 --max_length 2048 --lr 1e-4 \
    --logging_steps 1 --gradient_dtype "${GRADIENTS:-bf16}" --no_save_model --output_dir "/tmp/runs/$name" "$@" >"$out/train_$name.txt" 2>&1
  say "$name: exit $? in $((SECONDS - began)) s · $(grep -oE 'device [0-9,.]+/[0-9,.]+ MiB · host [0-9,.]+' "$out/train_$name.txt" | tail -n 1)"
  grep -E "error|panicked|estimated|Booster|Max CUDA|The step waited" "$out/train_$name.txt" | cut -c1-200 | tr '\n' '|' | tee -a "$summary"
  python3 - "/tmp/runs/$name/train_log.jsonl" <<'P' | tee -a "$summary"
import json, sys
try:
    s = [x for x in map(json.loads, open(sys.argv[1])) if x.get('kind') == 'step']
    late = s[2:] or s[1:]
    rate = sum(x['tokens'] for x in late) / sum(x['seconds'] for x in late)
    print(f'   tokens/s {rate:.0f} samples/s {rate / 2048:.3f} losses', [round(x['loss'], 6) for x in s[:4]], 'seconds', [round(x['seconds'], 3) for x in s])
except Exception as e:
    print('   no log:', e)
P
  cat "$out/train_$name.txt" >>"$out/train.txt"; rm -f "$out/train_$name.txt"
}

if part equal; then
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
  (for test in updates classify embedding columns attention_det attention_plain; do
    (cd /tmp && CUDA_VISIBLE_DEVICES=1 timeout 50 "$sanitizer" --tool racecheck --error-exitcode 9 "$OLDPWD/$carried/cuda_device" "$test"; echo "exit $?")
  done >"$out/racecheck.txt" 2>&1) & racecheck=$!
  small="--backend cuda --config configs/smollm2-135m.json --max_length 512 --max_steps 5 --no_shuffle --data /tmp/random.bin --eval_fraction 0 --lr 1e-4 --no_save_model"
  for precision in no bf16; do
    timeout 60 "$castor" train $small --mixed_precision $precision --batch_size 8 --plugin ddp --output_dir /tmp/runs/eq_one_$precision >/dev/null 2>&1
    for plugin in ddp zero1 zero2 zero2_offload zero3 zero3_offload gemini_cuda gemini_cpu gemini_auto zero3:again; do
      timeout 60 "$castor" run --nproc_per_node 2 train $small --mixed_precision $precision --batch_size 4 --plugin ${plugin%:again} \
        --output_dir /tmp/runs/eq_${plugin}_$precision >"$out/eq.log" 2>&1 || say "$plugin $precision: exit $?: $(grep error "$out/eq.log" | head -1 | cut -c1-200)"
    done
  done
  python3 - <<'P' | tee -a "$summary"
import json
def steps(name): return [(x['loss'], x['grad_norm']) for x in map(json.loads, open(f'/tmp/runs/{name}/train_log.jsonl')) if x.get('kind') == 'step']
for precision in ('no', 'bf16'):
    one = steps(f'eq_one_{precision}')
    for plugin in 'ddp zero1 zero2 zero2_offload zero3 zero3_offload gemini_cuda gemini_cpu gemini_auto'.split():
        try:
            s = steps(f'eq_{plugin}_{precision}')
            print(f'   {precision:5} {plugin:14} 2 x 4 against 1 x 8, 5 steps: losses {max(abs(a[0] / b[0] - 1) for a, b in zip(s, one)):.1e} norms {max(abs(a[1] / b[1] - 1) for a, b in zip(s, one)):.1e}', len(s) == len(one))
        except Exception as e: print('  ', plugin, precision, e)
    print('   the same bits again:', steps(f'eq_zero3_{precision}') == steps(f'eq_zero3:again_{precision}'))
P
  wait $racecheck; grep -E "ok|FAILED|SUMMARY|exit" "$out/racecheck.txt" | tr '\n' ' ' | tee -a "$summary"; echo
fi
if part seven; then
  seven="--backend cuda --config configs/llama2-7b.json --mixed_precision bf16 --batch_size 8 --no_deterministic"
  LIMIT=60 train 7b_one $seven --plugin gemini_cuda --max_steps 8
  LIMIT=70 two 7b_zero3 $seven --plugin zero3 --max_steps 10
  LIMIT=70 two 7b_gemini_cuda $seven --plugin gemini_cuda --max_steps 10
  LIMIT=100 SOFT=45 STEPS=6 bash "$carried/peers/cases.sh" A2-7b-fsdp 2>&1 | cut -c1-420 | tee -a "$summary"
fi
if part replan; then
  BUDGET=3GiB replanned lowered run --nproc_per_node 2 train --backend cuda --config configs/smollm2-135m.json --data /tmp/random.bin --eval_fraction 0 \
    --lr 1e-4 --no_save_model --mixed_precision bf16 --max_length 2048 --batch_size 8 --max_steps 150 --device_memory 8GiB
fi
if part kill; then
  (sleep 14; pkill -9 -f -n "output_dir /tmp/runs/killed"; date +%s.%N >/tmp/killed_at) &
  timeout 60 "$castor" run --nproc_per_node 2 train --backend cuda --config configs/castor-1.3b.json --data /tmp/random.bin --max_length 2048 \
    --batch_size 4 --mixed_precision bf16 --max_steps 10000 --plugin zero3 --no_save_model --output_dir /tmp/runs/killed >"$out/killed.txt" 2>&1
  say "killed rank: exit $? $(python3 -c "import time; print(round(time.time() - float(open('/tmp/killed_at').read()), 1), 's after the kill')") · processes left: $(pgrep -cf runs/killed) · GPU MiB: $(sleep 1; nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | tr '\n' ' ')"
  grep -E "rank|killed|signal" "$out/killed.txt" | tail -n 4 | cut -c1-200 | tee -a "$summary"
fi
if part groups; then
  untied=$(mktemp -d); sed 's/"tie_word_embeddings": true/"tie_word_embeddings": false/' configs/smollm2-135m.json >"$untied/config.json"
  small="--backend cuda --config $untied/config.json --max_length 512 --max_steps 5 --no_shuffle --data /tmp/random.bin --eval_fraction 0 --lr 1e-4 --no_save_model --mixed_precision bf16 --batch_size 4 --gradient_accumulation_steps 4"
  group() { # name, then flags
    local name=$1; shift
    timeout 60 "$castor" run --nproc_per_node 2 train $small --output_dir "/tmp/runs/group_$name" "$@" >"$out/group.log" 2>&1 || say "$name: exit $?: $(grep error "$out/group.log" | head -1 | cut -c1-200)"
  }
  group ddp --plugin ddp; group replicas --plugin zero3 --shard_size 1; group split --plugin zero3
  group synced --plugin zero3 --sync_each_batch
  group synced_host --plugin gemini_cpu --sync_each_batch --device_memory 2GiB
  python3 - <<'P' | tee -a "$summary"
import json
def steps(name): return [(x['loss'], x['grad_norm']) for x in map(json.loads, open(f'/tmp/runs/group_{name}/train_log.jsonl')) if x.get('kind') == 'step']
off = lambda a, b: max(abs(x[0] / y[0] - 1) for x, y in zip(steps(a), steps(b)))
for a, b in (('replicas', 'ddp'), ('split', 'ddp'), ('synced', 'split'), ('synced_host', 'synced')):
    try: print(f'   {a} against {b}: losses {off(a, b):.1e}, equal bits {steps(a) == steps(b)}')
    except Exception as e: print('  ', a, b, e)
P
fi
if part alone; then
  one="--eval_fraction 0 --lr 1e-3 --logging_steps 1 --no_save_model"
  python3 -c "
import json
for i in range(600): print(json.dumps({'text': f'document {i} says ' + ' '.join(str(i * k % 97) for k in range(1 + i % 60))}))" >/tmp/documents.jsonl
  for backend in cuda cpu; do
    timeout 60 "$castor" train --backend $backend --config configs/castor-tiny.json --data /tmp/documents.jsonl --tokenizer bytes --document_mask --mixed_precision no \
      --max_length 256 --batch_size 4 --max_steps 10 $one --output_dir /tmp/runs/alone_masked_$backend >"$out/alone.log" 2>&1 || say "masked $backend: exit $?: $(grep error "$out/alone.log" | head -1 | cut -c1-200)"
  done
  timeout 60 "$castor" train --backend cuda --config configs/castor-tiny.json --data /tmp/documents.jsonl --tokenizer bytes --document_mask --mixed_precision bf16 \
    --max_length 256 --batch_size 4 --max_steps 10 $one --output_dir /tmp/runs/alone_masked_bf16 >"$out/alone.log" 2>&1 || say "masked bf16: exit $?"
  saves="--backend cuda --config configs/smollm2-135m.json --data /tmp/random.bin --mixed_precision bf16 --max_length 2048 --batch_size 8 --max_steps 60 --save_steps 20 $one"
  for async in on off; do
    timeout 60 "$castor" train $saves --async_save $async --output_dir /tmp/runs/alone_$async >"$out/alone_$async.txt" 2>&1 || say "save $async: exit $?: $(grep error "$out/alone_$async.txt" | head -1 | cut -c1-200)"
    grep -E "held|waited|save" "$out/alone_$async.txt" | tail -n 5 | cut -c1-200 | tee -a "$summary"
  done
  cp -r /tmp/runs/alone_on /tmp/runs/alone_again; rm -rf /tmp/runs/alone_again/checkpoint-{40,60}
  timeout 60 "$castor" train $saves --resume latest --output_dir /tmp/runs/alone_again >"$out/alone.log" 2>&1 || say "resume: exit $?: $(grep error "$out/alone.log" | head -1 | cut -c1-200)"
  python3 - <<'P' | tee -a "$summary"
import json
def steps(name): return [(x['loss'], x['grad_norm']) for x in map(json.loads, open(f'/tmp/runs/alone_{name}/train_log.jsonl')) if x.get('kind') == 'step']
def seconds(name): return [round(x['seconds'], 3) for x in map(json.loads, open(f'/tmp/runs/alone_{name}/train_log.jsonl')) if x.get('kind') == 'step']
try:
    a, b, c = steps('masked_cuda'), steps('masked_cpu'), steps('masked_bf16')
    print('   masked, fp32, cuda against cpu:', max(abs(x[0] / y[0] - 1) for x, y in zip(a, b)), '· bf16 against fp32:', max(abs(x[0] / y[0] - 1) for x, y in zip(a, c)))
    print('   saves beside and held, 60 steps: equal bits', steps('on') == steps('off'), '· resumed at 20: equal bits', steps('again')[-40:] == steps('on')[20:], len(steps('again')))
    print('   seconds around the saves: beside', seconds('on')[18:23], seconds('on')[38:43], 'held', seconds('off')[18:23], seconds('off')[38:43])
except Exception as e: print('   alone:', e)
P
fi
if part 70b; then
  random_tokens 256
  LIMIT=${LONG:-480} two 70b --backend cuda --config configs/llama2-70b.json --mixed_precision bf16 --no_deterministic --optimizer_states 8bit --plugin gemini_cuda \
    --clip lagged --batch_size 4 --gradient_accumulation_steps 4 --max_steps ${STEPS_70B:-10} --warmup_steps 2 --host_memory ${HOST_70B:-114GiB} --device_memory ${DEVICE_70B:-auto}
  free -g | head -2 | tee -a "$summary"
fi
if part offload; then
  article="--backend cuda --config configs/article-4block.json --mixed_precision fp16 --grad_checkpoint"
  GRADIENTS=fp16 two article_ddp_flash $article --plugin ddp --batch_size 16 --gradient_accumulation_steps 8 --max_steps 3
  GRADIENTS=fp16 two article_zero3_offload $article --plugin zero3_offload --batch_size 12 --gradient_accumulation_steps 8 --max_steps 4
fi
if part article; then
  article="--backend cuda --config configs/article-4block.json --mixed_precision fp16 --grad_checkpoint"
  GRADIENTS=fp16 two article_ddp_flash $article --plugin ddp --batch_size 16 --gradient_accumulation_steps 8 --max_steps 3
  GRADIENTS=fp16 two article_ddp_plain $article --plugin ddp --no_flash_attention --batch_size 8 --gradient_accumulation_steps 8 --max_steps 3
  GRADIENTS=fp16 two article_zero2 $article --plugin zero2 --batch_size 12 --gradient_accumulation_steps 32 --max_steps 2
  GRADIENTS=fp16 two article_zero3 $article --plugin zero3 --batch_size 12 --gradient_accumulation_steps 8 --max_steps 3
  GRADIENTS=fp16 two article_zero3_offload $article --plugin zero3_offload --batch_size 12 --gradient_accumulation_steps 8 --max_steps 3
  GRADIENTS=fp16 two article_fsdp $article --fsdp "full_shard auto_wrap" --batch_size 2 --gradient_accumulation_steps 8 --max_steps 6
  GRADIENTS=fp16 two article_gemini $article --plugin gemini_cuda --batch_size 28 --max_steps 6
  GRADIENTS=fp16 two article_gemini_plain $article --plugin gemini_cuda --no_flash_attention --batch_size 28 --max_steps 4
  peer=$carried/peers/baseline_torch.py
  for attention in math; do
    OMP_NUM_THREADS=16 timeout 70 python3 -m torch.distributed.run --standalone --nproc-per-node 2 $peer --size 7b --layers 4 --dtype fp16 --batch 8 --accum 2 \
      --gc --attn $attention --mode ddp --steps 4 --warmup 2 --time-limit 60 2>"$out/peer.log" | grep '^{"peer"' | tail -1 | cut -c1-330 | tee -a "$summary"
  done
fi
if part stopped; then
  small="--backend cuda --config configs/smollm2-135m.json --max_length 512 --data /tmp/random.bin --eval_fraction 0 --no_save_model --mixed_precision bf16 --batch_size 4"
  (sleep 12; pkill -STOP -f -n "output_dir /tmp/runs/stopped"; date +%s.%N >/tmp/stopped_at) &
  timeout -k 5 60 "$castor" run --nproc_per_node 2 --timeout 5 train $small --max_steps 100000 --plugin zero3 --output_dir /tmp/runs/stopped >"$out/stopped.txt" 2>&1
  say "stopped rank: exit $? $(python3 -c "import time; print(round(time.time() - float(open('/tmp/stopped_at').read()), 1), 's after it was stopped')") · processes left: $(pgrep -cf runs/stopped)"
  grep -E "rank|answer" "$out/stopped.txt" | tail -n 3 | cut -c1-200 | tee -a "$summary"
fi
