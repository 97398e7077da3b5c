#!/usr/bin/env bash
# One GPU: racecheck of the device tests that are named, side by side, and the device tests from the first to the last.
# Usage: race.sh CARRIED TEST..., a folder with cuda_device; logs go to $OUT.
set -u
tests=$PWD/$1/cuda_device out=${OUT:-/tmp/out}
shift
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
cd /tmp || exit
for test in "$@"; do
  (timeout "${SANITIZE:-180}" "$sanitizer" --tool racecheck --error-exitcode 9 "$tests" "$test" >"$out/race_$test.txt" 2>&1; echo "exit $?" >>"$out/race_$test.txt") &
done
timeout "${SANITIZE:-180}" "$tests" >"$out/device_tests.txt" 2>&1
grep -E "FAILED|passed|skipped|panicked" "$out/device_tests.txt" | cut -c1-300
wait
for test in "$@"; do
  echo "$test: $(grep -E "ok \(|FAILED|exit" "$out/race_$test.txt" | tr '\n' ' ') hazards in: $(grep -oE "access at [a-zA-Z0-9_]+" "$out/race_$test.txt" | sed 's/access at //' | cut -c1-50 | sort -u | tr '\n' ' ')"
done
