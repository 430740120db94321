#!/usr/bin/env bash
# The paper's efficiency section (App. B.4 and C.7: Tables B.13, B.14, C.22, C.23) on a GH200 or any other CUDA machine
# of compute capability 8.0 or later, with GLM-4-9B-Chat-1M's shape and random weights; then a report with the paper's
# figures beside the measured ones. What does not fit into the GPU's memory is marked, not tried.
#
#   bash scripts/gh200.sh [OUTPUT_DIR]
#   SHORT=1 bash scripts/gh200.sh [OUTPUT_DIR]   # some minutes: fewer contexts, batch sizes and tokens
#
# In full it takes hours, most of them prefills and long generations of dense attention. Interrupted, it goes on where it
# was when started again. PYTHON chooses the interpreter, SHAPE another shape, STEP=eager captures the graphs without
# compiling the model first, LINEAR=torch keeps torch's linear layers in all arms (by default all but those of
# Transformers itself have the fast ones), STAGES names the parts to run, CONTEXTS and ARMS those of the decode steps of
# batch 1. DEVICE=cpu SHAPE=tiny tries the script out.
set -euo pipefail
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # threads that spin while they wait take the cores of the others
short=${SHORT:-}
output=${1:-runs/gh200${short:+-short}}
python=${PYTHON:-python}
shape=${SHAPE:-glm-4-9b-1m}
device=${DEVICE:-cuda}
stages=${STAGES:-decode batched prefill longgen kernels generate}
"$python" -c 'import locks_hf.timing' || {
  echo "error: $python lacks the package: pip install -e '.[plots]', or set PYTHON (installed without -e, the package is" \
    "found from other folders than this one only)" >&2
  exit 1
}

common=(--shape "$shape" --device "$device")
linear=(--linear "${LINEAR:-fast}")
graph=(--step "${STEP:-compiled}" "${linear[@]}")
if [ -n "$short" ]; then
  graph+=(--settle 1)
  contexts=(16K 128K 512K)
  batched_contexts=(64K) batches=(4)
  prompts=(16K 32K) repeats=1
  new=2K long_arms=(cudnn locks-r4i4)
  kernel_contexts=(128K 512K)
  generate=(--contexts 128K --new 128 --skip 48)
else
  contexts=(16K 32K 64K 128K 256K 512K 1M)
  batched_contexts=(32K 64K 128K 256K) batches=(2 4 8 16 32)
  prompts=(16K 32K 64K 128K 256K 512K) repeats=3
  new=128K long_arms=(dense quest locks-r4i4)
  kernel_contexts=(16K 128K 512K 1M)
  generate=(--contexts 16K 128K)
fi
prompt=32K
if [ "$shape" = tiny ]; then # a trial: small enough for a CPU
  common+=(--budget 64)
  contexts=(512) batched_contexts=(512) batches=(2) prompts=(256) kernel_contexts=(512)
  prompt=64 new=40 repeats=1 long_arms=(dense locks-r4i4)
  generate=(--contexts 200 --new 12 --skip 4)
fi
read -rd '' -a contexts <<<"${CONTEXTS:-${contexts[*]}}" || true
read -rd '' -a arms <<<"${ARMS:-default}" || true
failed=()
runs=()
# stage NAME ARGUMENTS...: one run of python -m locks_hf.timing; a failure does not keep the others from running.
stage() {
  local name=$1
  shift
  case " $stages " in *" $name "*) ;; *) return 0 ;; esac
  printf '\n==> %s\n' "$name" >&2
  mkdir -p "$output"
  if "$python" -m locks_hf.timing "$1" "${common[@]}" --output "$output/$name" "${@:2}" >"$output/$name.md"; then
    runs+=("$output/$name")
  else
    status=$?
    [ "$status" -ne 130 ] || exit 130
    failed+=("$name")
    # What was measured before the failure belongs into the report as well.
    if [ -s "$output/$name/cells.jsonl" ] && grep -q '"timing"' "$output/$name/config.json"; then
      runs+=("$output/$name")
    fi
  fi
}

stage decode decode "${graph[@]}" --profile --contexts "${contexts[@]}" --arms "${arms[@]}"
stage batched decode "${graph[@]}" --contexts "${batched_contexts[@]}" --batch "${batches[@]}" \
  --arms none dense locks-r4i4 locks-r8i4
stage prefill prefill --contexts "${prompts[@]}" --chunk 8K --repeats "$repeats"
stage longgen longgen --step "${STEP:-compiled}" "${linear[@]}" --prompt "$prompt" --new "$new" --arms "${long_arms[@]}"
stage kernels kernels --contexts "${kernel_contexts[@]}"
stage generate generate "${linear[@]}" "${generate[@]}"

if [ ${#runs[@]} -gt 0 ]; then
  "$python" -m locks_hf.timing report "${runs[@]}" --output "$output"
  echo "$output/report.md" >&2
fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "error: failed: ${failed[*]}; the same command goes on with what is missing" >&2
  exit 1
fi
