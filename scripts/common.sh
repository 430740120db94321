# Functions of the scripts in this folder; sourced, with the repository root in $root.

# Threads that wait for each other sleep instead of spinning: where other programs share the cores, small tensor
# operations are several times faster so.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

# Say what is being done, on stderr: stdout carries results.
say() { printf '\n==> %s\n' "$*" >&2; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Print the interpreter to use: $PYTHON if set, else the first suitable one on the PATH.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$candidate cannot make virtual environments: install its venv package (Debian: python3-venv)"
      printf '%s\n' "$candidate"
      return
    fi
    [ "$candidate" != "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a Python of version 3.10 or later"
  done
  die "no Python of version 3.10 or later on the PATH: install one, or set PYTHON to its path"
}

# make_venv FOLDER EXTRAS: a virtual environment with this package, editable. One that was finished for the same
# requirements is kept as it is. torch goes in first and by itself, so that $TORCH decides which build it is, for
# instance TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'.
make_venv() {
  local folder=$root/$1 extras=$2 torch=${TORCH:-torch==2.13.0} python stamp
  python=$(find_python)
  stamp=$("$python" --version; printf '%s\n' "$root" "$torch" "$extras"; cat "$root/pyproject.toml")
  if [ "$(cat "$folder/finished" 2>/dev/null)" = "$stamp" ]; then
    return
  fi
  say "installing into $1"
  "$python" -m venv --clear "$folder"
  # shellcheck disable=SC2086  # $torch may carry options
  "$folder/bin/python" -m pip install --disable-pip-version-check $torch >&2
  "$folder/bin/python" -m pip install --disable-pip-version-check --quiet --editable "$root[$extras]" >&2
  printf '%s\n' "$stamp" >"$folder/finished"
}
