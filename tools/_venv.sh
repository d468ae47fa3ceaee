# Sourced by tools/test and tools/quickstart: sets ROOT and PYTHON, a Python that has lingvo_moe
# installed from this checkout, in the active virtual environment or else in ROOT/.venv.
#
#   EXTRA=test   set by the caller: install that extra of setup.py too; unset: the package alone

ROOT="$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

say() { printf '== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }
version() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo missing; }

# Prints the first Python 3.11 to 3.13 among $PYTHON (if given) or python3 and its versioned names.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if supported "$candidate"; then echo "$candidate"; return; fi
  done
  die "lingvo_moe needs Python 3.11, 3.12 or 3.13, but ${PYTHON:-python3} here is" \
    "$(version "${PYTHON:-python3}"). Install one of them, or name it: PYTHON=/path/to/python3.12 $0"
}

make_venv() {
  local base
  base="$(find_python)"
  "$base" -c 'import ensurepip, venv' 2>/dev/null || die "$base ($(version "$base")) cannot make" \
    "virtual environments: on Debian and Ubuntu install the package python3-venv, or activate an" \
    "environment of your own and run this again."
  say "Making a virtual environment in $ROOT/.venv with Python $(version "$base")"
  "$base" -m venv --clear "$ROOT/.venv"
}

# Is the lingvo_moe that PYTHON imports, params/ with it, the one of this checkout?
installed_here() {
  local found
  found="$("$PYTHON" -P -c 'import lingvo_moe.params as p; print(p.__file__)' 2>/dev/null)" || return
  [[ "$found" == "$ROOT/params/__init__.py" ]]
}

# Installs when setup.py, the checkout or the Python changed since the last time, or when EXTRA was
# not installed then. The stamp's first line says for what it was made, its second which extra.
install_package() {
  local stamp wanted installed had extra="${EXTRA:-}" quiet=()
  stamp="$("$PYTHON" -c 'import sys; print(sys.prefix)')/.lingvo_moe_installed"
  wanted="$ROOT $(version "$PYTHON") $(cksum < "$ROOT/setup.py")"
  { read -r installed; read -r had; } 2>/dev/null < "$stamp" || true
  if [[ "${installed:-}" == "$wanted" && ( -z "$extra" || "${had:-}" == "$extra" ) ]] && installed_here; then return; fi
  say "Installing lingvo_moe and what it needs from PyPI (TensorFlow is large: some minutes)"
  if [[ -n "${CI:-}" || ! -t 1 ]]; then quiet=(--quiet --progress-bar=off); fi
  "$PYTHON" -c 'import pip' 2>/dev/null || "$PYTHON" -m ensurepip
  (cd "$ROOT" && "$PYTHON" -m pip install --disable-pip-version-check --no-input "${quiet[@]}" \
    --editable ".${extra:+[$extra]}")
  printf '%s\n%s\n' "$wanted" "$extra" > "$stamp"
}

if [[ -n "${VIRTUAL_ENV:-}" ]]; then
  PYTHON="$VIRTUAL_ENV/bin/python"
  supported "$PYTHON" || die "lingvo_moe needs Python 3.11, 3.12 or 3.13, but the active virtual" \
    "environment $VIRTUAL_ENV has $(version "$PYTHON"): deactivate it and run this again."
  say "Using the active virtual environment $VIRTUAL_ENV"
else
  "$ROOT/.venv/bin/python" -c '' 2>/dev/null || make_venv
  PYTHON="$ROOT/.venv/bin/python"
  supported "$PYTHON" || die "lingvo_moe needs Python 3.11, 3.12 or 3.13, but $ROOT/.venv has" \
    "$(version "$PYTHON"): remove that folder and run this again."
fi
install_package
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-3}"
