#!/usr/bin/env bash
# From a fresh clone to a comparison of sparse decoding methods on a real model: bash scripts/quickstart.sh
#
# Makes .venv-quickstart, fetches SmolLM2-135M-Instruct and the essays once, and has the model find needles in
# prompts of 2048 tokens while it attends all of them (full), or 64 or 128 chosen exactly (oracle), by Locks of rank
# 8 and 4, and by Quest. Everything runs on the CPU. Interrupted, it goes on where it was when started again.
# PYTHON and TORCH choose the interpreter and the torch build (see common.sh).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
. scripts/common.sh

make_venv .venv-quickstart eval,plots
python=.venv-quickstart/bin/python
output=quickstart

say "comparing nine settings on 16 prompts; 6 to 9 minutes on 2 cores"
"$python" -m locks_hf.eval ruler \
  --model smollm2 --device cpu --tasks niah_single_2 niah_multikey_1 --lengths 2048 --limit 8 --max-new-tokens 24 \
  --selector full oracle locks quest --rank 8 4 --budget 64 128 --output $output
printf '\nPlot: '
"$python" -m locks_hf.eval plot $output
