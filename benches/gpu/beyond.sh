#!/usr/bin/env bash
# One GPU, issue "planner": everything off the GPU against everything on it, and models beyond it, each with the time
# that the plan predicts by rates measured in this run.
# Usage: beyond.sh CARRIED, a folder with castor and peers; PARTS chooses from bits hidden small free 13b sweep cpu replan 30b article manual lagged; logs go to $OUT.
set -u
PARTS=${PARTS:-bits hidden small free 13b 30b}
carried=$1 castor=$1/castor out=${OUT:-/tmp/out}
. "$(dirname "$0")/common.sh"
random_tokens
timeout 60 "$castor" doctor --bench --nvme /tmp 2>&1 | grep -E "FLOP|B/s" | cut -c1-60 | tee -a "$summary"
if part article; then GRADIENTS=fp16 LIMIT=60 train article_free --backend cuda --config configs/article-4block.json --mixed_precision fp16 --batch_size 8 --max_steps 30 --no_deterministic; fi
seven="--backend cuda --config configs/llama2-7b.json --mixed_precision bf16"
if part free; then LIMIT=60 train 7b_64k_free $seven --batch_size 8 --gradient_accumulation_steps 4 --max_steps 4 --no_deterministic; fi
if part bits; then
  LIMIT=60 train bits_device $seven --batch_size 2 --recompute full --max_steps ${BITS:-20} --plugin zero3
  LIMIT=110 train bits_host $seven --batch_size 2 --recompute full --max_steps ${BITS:-20} --plugin gemini_cpu --device_memory 16GiB
fi
if part hidden; then
  LIMIT=60 train 64k_device $seven --batch_size 8 --gradient_accumulation_steps 4 --recompute full --max_steps 4 --plugin zero3
  LIMIT=90 train 64k_host $seven --batch_size 8 --gradient_accumulation_steps 4 --recompute full --max_steps 4 --plugin gemini_cpu --device_memory 48GiB
  LIMIT=60 train 32k_8bit_device $seven --batch_size 8 --gradient_accumulation_steps 2 --recompute full --max_steps 4 --plugin zero3 --optimizer_states 8bit
  LIMIT=60 train 32k_8bit_host $seven --batch_size 8 --gradient_accumulation_steps 2 --recompute full --max_steps 4 --plugin gemini_cpu --device_memory 48GiB --optimizer_states 8bit
fi
if part small; then
  LIMIT=60 train 1b3_32k_host --backend cuda --config configs/castor-1.3b.json --mixed_precision bf16 --batch_size 8 --gradient_accumulation_steps 2 --max_steps 10 --plugin gemini_cpu
  LIMIT=80 SOFT=40 STEPS=4 bash "$carried/peers/cases.sh" A-1b3-off 2>&1 | cut -c1-420 | tee -a "$summary"
fi
thirteen="--backend cuda --config configs/llama2-13b.json --mixed_precision bf16 --no_deterministic"
sweep() { # name, rows of a micro-batch, micro-batches, steps
  LIMIT=120 train "13b_$1" $thirteen --batch_size "$2" --gradient_accumulation_steps "$3" --max_steps "$4"
}
if part 13b; then sweep 64k 4 8 4; sweep 64k_wide 8 4 4; fi
if part sweep; then sweep 8k 4 1 5; sweep 16k 4 2 4; sweep 32k 4 4 4; sweep 128k 4 16 3; sweep 256k 8 16 2; fi
if part cpu; then
  # The host's cores update a share: the same bits, and what the plan says of it.
  for share in 0 0.25 1 auto; do
    LIMIT=40 train "cpu_update_$share" --backend cuda --config configs/castor-1.3b.json --mixed_precision bf16 --batch_size 8 --gradient_accumulation_steps 2 --max_steps 8 --device_memory 16GiB --cpu_update $share
  done
  for share in ${SHARES:-0.12}; do LIMIT=120 train "13b_cpu_update_$share" $thirteen --batch_size 4 --gradient_accumulation_steps 8 --max_steps 4 --cpu_update $share; done
fi
if part replan; then
  small="train --backend cuda --config configs/smollm2-135m.json --data /tmp/random.bin --eval_fraction 0 --lr 1e-4 --no_save_model --mixed_precision bf16 --max_length 2048 --batch_size 8"
  BUDGET=3GiB replanned lowered $small --max_steps 150 --device_memory 8GiB
  # By rates that are a hundredth of the link's, then by those that the first steps show.
  mkdir -p /tmp/slow/castor
  python3 - "${XDG_CACHE_HOME:-$HOME/.cache}/castor/rates.json" <<'P'
import json, sys
rates = json.load(open(sys.argv[1]))
for place in rates['places'].values():
    for name in place['rates']:
        if 'host' in name: place['rates'][name]['value'] /= 100
json.dump(rates, open('/tmp/slow/castor/rates.json', 'w'))
P
  XDG_CACHE_HOME=/tmp/slow replanned measured $small --max_steps 400 --device_memory 3GiB
fi
if part 30b; then
  LIMIT=${LONG:-330} train 30b_8bit --backend cuda --config configs/castor-30b.json --mixed_precision bf16 --batch_size 2 --gradient_accumulation_steps 32 --max_steps 3 --optimizer_states 8bit --no_deterministic \
    --host_memory 120GiB --nvme /tmp --nvme_capacity 20GiB
fi
free -g | head -2 | tee -a "$summary"
if part lagged; then
  # Where nothing is clipped, updates behind the backward end in the bits of those that wait for the norm.
  for clip in exact lagged; do
    LIMIT=40 train "clip_$clip" --backend cuda --config configs/castor-1.3b.json --mixed_precision bf16 --batch_size 8 --max_steps 8 --grad_clip 0 --clip $clip --device_memory 24GiB
  done
fi
if part manual; then
  # What auto chooses beside choices made by hand, with 16 GiB of the GPU.
  hand() { # name, then flags
    local name=$1; shift
    LIMIT=40 train "hand_$name" --backend cuda --config configs/castor-1.3b.json --mixed_precision bf16 --batch_size 8 --gradient_accumulation_steps 4 --max_steps 8 --device_memory 16GiB "$@"
  }
  hand auto --plugin gemini_auto
  hand cpu --plugin gemini_cpu
  hand zero3_offload --plugin zero3_offload
  hand optim_half --plugin gemini --offload_optim_frac 0.5
  hand optim_all --plugin gemini --offload_optim_frac 1
  for prefetch in 512MiB 1GiB 2GiB; do hand "prefetch_$prefetch" --plugin gemini_auto --prefetch $prefetch; done
  for recompute in none selective full; do hand "recompute_$recompute" --plugin gemini_auto --recompute $recompute; done
  python3 - <<'P' | tee -a "$summary"
import json, glob
rates = {}
for path in glob.glob('/tmp/runs/hand_*/train_log.jsonl'):
    s = [x for x in map(json.loads, open(path)) if x.get('kind') == 'step'][3:]
    if s: rates[path.split('hand_')[1].split('/')[0]] = sum(x['tokens'] for x in s) / sum(x['seconds'] for x in s)
for name, rate in sorted(rates.items(), key=lambda x: -x[1]): print(f'   {name:20} {rate:8.0f} tokens/s  {rate / rates["auto"]:.3f} of auto')
P
fi
