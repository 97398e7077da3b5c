#!/usr/bin/env bash
# One GPU: everything off the GPU against everything on it (same formats, same recompute), and models beyond it.
# Usage: offload.sh CASTOR_BINARY; logs go to $OUT.
set -u
castor=$1 out=${OUT:-/tmp/out}
. "$(dirname "$0")/common.sh"
random_tokens
seven="--backend cuda --config configs/llama2-7b.json --mixed_precision bf16 --batch_size 8 --recompute full"
train 7b_128k_device $seven --gradient_accumulation_steps 8 --max_steps 4 --plugin zero3
train 7b_128k_host $seven --gradient_accumulation_steps 8 --max_steps 4 --plugin gemini_cpu
train 7b_64k_device $seven --gradient_accumulation_steps 4 --max_steps 4 --plugin zero3
train 7b_64k_host $seven --gradient_accumulation_steps 4 --max_steps 4 --plugin gemini_cpu
train 13b_64k --backend cuda --config configs/llama2-13b.json --mixed_precision bf16 --batch_size 8 --gradient_accumulation_steps 4 --max_steps 3 --plugin gemini_cuda
train 30b_8bit --backend cuda --config configs/castor-30b.json --mixed_precision bf16 --batch_size 4 --max_steps 3 --plugin gemini_cuda --optimizer_states 8bit
free -g | tee -a "$summary"; nproc | tee -a "$summary"
