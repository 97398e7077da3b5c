# Shared by the scripts here: a file of random tokens, one training run with a line of its results, and one whose plan
# changes while it goes on.
# Expects $castor and $out, and $PARTS where there are parts.
summary=$out/summary.txt
say() { echo "$*" | tee -a "$summary"; }

part() { [[ " $PARTS " == *" $1 "* ]]; }

random_tokens() { # how many different ones; few are soon learnt
  python3 - "${1:-32000}" <<'P'
import struct, sys, random, array
random.seed(1)
n = 4_000_000
ids = array.array('H', random.choices(range(int(sys.argv[1])), k=n))
with open('/tmp/random.bin', 'wb') as f:
    f.write(struct.pack('<256i', 20240520, 1, n, *([0] * 253)))
    ids.tofile(f)
P
}

train() { # name, then flags
  local name=$1 began=$SECONDS; shift
  timeout "${LIMIT:-150}" "$castor" train --data /tmp/random.bin --eval_fraction 0 --max_length 2048 --lr 1e-4 \
    --logging_steps 1 --gradient_dtype "${GRADIENTS:-bf16}" --no_save_model --output_dir "/tmp/runs/$name" "$@" >"$out/train_$name.txt" 2>&1
  local code=$?
  say "$name: exit $code in $((SECONDS - began)) s · $(grep -E '^step' "$out/train_$name.txt" | tail -n 1 | cut -c1-190)"
  grep -E "error|panicked|estimated|host to device  |device to host  |The step waited|^  device |^  host " "$out/train_$name.txt" | cut -c1-330 | tee -a "$summary"
  python3 - "/tmp/runs/$name/train_log.jsonl" <<'P' | tee -a "$summary"
import json, sys, hashlib
try:
    steps = [s for s in map(json.loads, open(sys.argv[1])) if 'loss' in s or 'loss' in s.get('step', {})]
    steps = [s.get('step', s) if isinstance(s.get('step'), dict) else s for s in steps]
    losses = [s['loss'] for s in steps]; norms = [s['grad_norm'] for s in steps]
    print('   losses', [round(x, 6) for x in losses[:6]], 'sha', hashlib.sha256(repr((losses, norms)).encode()).hexdigest()[:16],
          'seconds', [round(s['seconds'], 3) for s in steps])
except Exception as e:
    print('   no log:', e)
P
  cat "$out/train_$name.txt" >>"$out/train.txt"; rm -f "$out/train_$name.txt"
}

# A run whose device budget becomes $BUDGET while it goes on, beside the same run left alone: the same losses.
replanned() { # name, then words of castor
  local name=$1; shift
  timeout 60 "$castor" "$@" --replan off --output_dir "/tmp/runs/${name}_alone" >"$out/alone.log" 2>&1 || say "$name alone: exit $?"
  (until [ "$(grep -c '"kind":"step"' "/tmp/runs/$name/train_log.jsonl" 2>/dev/null)" -ge 20 ]; do sleep 0.2; done
    if [ "${BUDGET:-}" ]; then "$castor" replan "/tmp/runs/$name" --device_memory "$BUDGET"; fi) >"$out/request_$name.txt" 2>&1 &
  local asks=$!
  timeout -k 5 90 "$castor" "$@" --output_dir "/tmp/runs/$name" >"$out/replanned_$name.txt" 2>&1
  local code=$?
  kill "$asks" 2>/dev/null
  say "$name: exit $code · $(tail -n 1 "$out/request_$name.txt")"
  grep -E "error|panicked|plan" "$out/replanned_$name.txt" | grep -v "^plan (" | cut -c1-400 | tail -n 8 | tee -a "$summary"
  python3 - "/tmp/runs/$name/train_log.jsonl" "/tmp/runs/${name}_alone/train_log.jsonl" <<'P' | tee -a "$summary"
import json, sys
runs = [[x for x in map(json.loads, open(path))] for path in sys.argv[1:]]
steps = [[(x['loss'], x['grad_norm']) for x in run if x.get('kind') == 'step'] for run in runs]
print('   changes of plan', sum(x.get('kind') == 'plan' for x in runs[0]), '· steps', *map(len, steps), '· the same bits', steps[0] == steps[1])
P
}
