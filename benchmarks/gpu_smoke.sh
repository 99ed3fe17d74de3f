#!/usr/bin/env bash
# The main job on one CUDA device: full fine-tuning, then LoRA in bf16, with the engine asleep while the policy trains.
# Writes its logs and metrics to ${OUT:-outputs/gpu_smoke}; takes about 4 minutes.
set -uo pipefail
out=${OUT:-outputs/gpu_smoke}
mkdir -p "$out"
common=(-c recipes/base.yaml -c recipes/quickstart.yaml --trainer.accelerator gpu --trainer.enable_progress_bar false)
python3 -m tlt_lightning fit "${common[@]}" --trainer.max_epochs 8 --data.engine.init_args.kv_cache_gib null \
  --data.engine.init_args.enforce_eager false 2>&1 | tee "$out/full.log" | tail -n 25
cp outputs/quickstart/csv/version_0/metrics.csv "$out/full.csv"
python3 -m tlt_lightning fit "${common[@]}" --trainer.max_epochs 4 --trainer.precision bf16-mixed \
  --data.engine.init_args.kv_cache_gib null --data.engine.init_args.dtype bfloat16 \
  --data.engine.init_args.enforce_eager false --model.lora.rank 16 --model.lora.base_dtype bfloat16 \
  2>&1 | tee "$out/lora.log" | tail -n 15
cp outputs/quickstart/csv/version_0/metrics.csv "$out/lora.csv"
