#!/usr/bin/env bash
# Lint and run all tests, in a virtual environment of their own: bash scripts/test.sh
#
# LOCKS_TEST_OLDEST=1 (or CI=true) adds a run under the oldest transformers supported. PYTHON and TORCH choose the
# interpreter and the torch build (see common.sh). The last line sums up all runs.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
. scripts/common.sh

make_venv .venv-test eval,plots,dev
python=$root/.venv-test/bin/python
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
status=0

# Most tests keep one core busy, the interpreter's above all: as many processes as cores, of one thread each.
processes=$(getconf _NPROCESSORS_ONLN)
processes=$((processes < 8 ? processes : 8))
export OMP_NUM_THREADS=1

# run_suite NAME PYTHON ARGUMENTS...: tests in several processes, whose counts go to $reports/NAME.xml.
run_suite() {
  local name=$1 interpreter=$2
  shift 2
  say "tests: $name"
  "$interpreter" -m pytest -q -n "$processes" --durations=5 --junitxml="$reports/$name.xml" "$@" || {
    say "tests: $name ended with exit status $?"
    status=1
  }
}

say "ruff"
for check in "check" "format --check"; do
  # shellcheck disable=SC2086  # two words
  "$python" -m ruff $check . >&2 || {
    say "ruff $check found something, see above"
    status=1
  }
done

run_suite main "$python" tests
TRITON_INTERPRET=1 run_suite interpreter "$python" tests/kernels/test_interpret_*.py

if [ "${LOCKS_TEST_OLDEST:-}" = 1 ] || [ "${CI:-}" = true ]; then
  # A second environment sees the packages of the first, torch among them, behind an older transformers of its own.
  folder=.venv-test-oldest
  version=$(sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
  stamp="transformers $version over $(cksum <.venv-test/finished)"
  if [ "$(cat $folder/finished 2>/dev/null)" != "$stamp" ]; then
    say "installing transformers $version into $folder"
    "$python" -m venv --clear $folder
    packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    printf 'import site; site.addsitedir("%s")\n' "$("$python" -c "$packages")" \
      >"$($folder/bin/python -c "$packages")/shared.pth"
    $folder/bin/python -m pip install --disable-pip-version-check --quiet "transformers==$version.*" >&2
    printf '%s\n' "$stamp" >$folder/finished
  fi
  run_suite oldest "$root/$folder/bin/python" -m "not slow" --ignore tests/kernels tests
fi

"$python" - "$reports" <<'END' || status=1
import sys
from pathlib import Path
from xml.etree import ElementTree

total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
for report in sorted(Path(sys.argv[1]).glob("*.xml")):
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for key in total:
            total[key] += int(suite.get(key))
failed = total["failures"] + total["errors"]
passed = total["tests"] - failed - total["skipped"]
print(f"{passed} passed, {failed} failed, {total['skipped']} skipped")
sys.exit(not passed)
END
exit "$status"
