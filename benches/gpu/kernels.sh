#!/usr/bin/env bash
# One GPU: the device tests, and the rates of the kernels, each cut of Castor's own attention among them.
# Usage: kernels.sh CARRIED, a folder with cuda_device and cuda_rates; logs go to $OUT.
set -u
carried=$1 out=${OUT:-/tmp/out}
timeout "${TESTS:-120}" "$carried/cuda_device" >"$out/device_tests.txt" 2>&1
grep -E "FAILED|passed|skipped|panicked" "$out/device_tests.txt" | cut -c1-300
timeout 90 "$carried/cuda_rates" 16384 --only attention 2>&1 | tee "$out/attention.txt" | cut -c1-260
timeout 90 "$carried/cuda_rates" 16384 >"$out/rates.txt" 2>&1
grep -iE "adam|rmsnorm|swiglu|GB/s|sophia" "$out/rates.txt" | cut -c1-200
