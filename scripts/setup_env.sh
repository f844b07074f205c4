# Sourced by demo.sh and test.sh: makes the virtual environment, installs the package with its [dev] extra, and puts it
# first on PATH. Returns at once when the environment is up to date.
#
# FSDP_QLORA_VENV names the environment (default: .venv in the repository).

SETUP_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SETUP_VENV="${FSDP_QLORA_VENV:-$SETUP_ROOT/.venv}"
SETUP_STAMP="$SETUP_VENV/.fsdp_qlora_installed"
# Without a GPU the version that the tests run with, with a GPU the newest. If the driver is too old for it, make the
# environment yourself with a torch that fits: it is kept.
SETUP_TORCH_CPU="torch==2.13.0"
SETUP_TORCH_GPU="torch>=2.11"

# Name a Python 3.10 to 3.13 that can make environments. A name on PATH may be a shim without a Python
# behind it, so each candidate is run.
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no Python 3.10 to 3.13 with the venv module was found on PATH. Install one (on Debian and" \
        "Ubuntu: python3 and python3-venv), or set FSDP_QLORA_VENV to an environment that has one." >&2
    return 1
}

has_gpu() {
    command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU'
}

# What the environment depends on; a change of any of it installs again.
setup_state() {
    cat "$SETUP_ROOT/pyproject.toml" "$SETUP_ROOT/scripts/setup_env.sh" | cksum
    echo "$SETUP_ROOT"
}

pip_install() {
    # On a terminal pip shows its progress; in a log only what went wrong.
    local quiet=(--quiet)
    [ -t 1 ] && quiet=()
    "$SETUP_VENV/bin/python" -m pip install --disable-pip-version-check --no-input ${quiet[@]+"${quiet[@]}"} "$@"
}

install_environment() {
    local python torch
    if ! "$SETUP_VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)" || return
        echo "setup: making $SETUP_VENV with $("$python" --version)"
        "$python" -m venv "$SETUP_VENV" || return
    fi
    # A torch that is already there is kept, whatever its version; pyproject.toml says if it is too old.
    if ! "$SETUP_VENV/bin/python" -m pip show --quiet torch >/dev/null 2>&1; then
        torch="$SETUP_TORCH_CPU"
        has_gpu && torch="$SETUP_TORCH_GPU"
        echo "setup: installing $torch (the largest download)"
        pip_install "$torch" || return
    fi
    echo "setup: installing fsdp_qlora and what it needs"
    pip_install --editable "$SETUP_ROOT[dev]" || return
    setup_state >"$SETUP_STAMP"
}

if [ "$(cat "$SETUP_STAMP" 2>/dev/null)" != "$(setup_state)" ]; then
    SETUP_START=$SECONDS
    install_environment || {
        echo "setup: failed; the reason is above. Run the script again to continue." >&2
        return 1
    }
    echo "setup: ready after $((SECONDS - SETUP_START)) s"
fi
# Not bin/activate: an environment made by conda has none.
export PATH="$SETUP_VENV/bin:$PATH"
