# Sourced by demo.sh and test.sh: makes the virtual environment, installs the package with its [dev] extra, and puts it
# first on PATH. Returns at once when the environment is up to date.
#
# FSDP_QLORA_VENV names the environment (default: .venv in the repository).

SETUP_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SETUP_VENV="${FSDP_QLORA_VENV:-$SETUP_ROOT/.venv}"
SETUP_STAMP="$SETUP_VENV/.fsdp_qlora_installed"
# With or without a GPU the version that all tests are run with. FSDP_QLORA_TORCH names another, where the driver is too
# old for it (torch==2.12.0); a torch that is already in the environment is kept.
SETUP_TORCH="${FSDP_QLORA_TORCH:-torch==2.13.0}"
. "$SETUP_ROOT/scripts/python_span.sh"

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
    local python
    if ! "$SETUP_VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)" || return
        echo "setup: making $SETUP_VENV with $("$python" --version)"
        "$python" -m venv "$SETUP_VENV" || return
    fi
    # A torch that is already there is kept, whatever its version; pyproject.toml says if it is too old.
    if ! "$SETUP_VENV/bin/python" -m pip show --quiet torch >/dev/null 2>&1; then
        echo "setup: installing $SETUP_TORCH (the largest download)"
        pip_install "$SETUP_TORCH" || return
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
