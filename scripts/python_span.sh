# Sourced by the scripts that make environments: finds a Python of the span that pyproject.toml names.

SPAN_FILE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/pyproject.toml"

# Print the versions of the span, lowest first: 3.11 3.12 ...
python_span() {
    local minor limits
    limits=($(sed -n 's/^requires-python = ">=3\.\([0-9]*\),<3\.\([0-9]*\)"$/\1 \2/p' "$SPAN_FILE"))
    for ((minor = limits[0]; minor < limits[1]; minor++)); do echo "3.$minor"; done
}

# Name the first Python of the span that can make environments: of the candidates, by default python3 and then the span's
# from the highest down. A name on PATH may be a shim without a Python behind it, so each candidate is run.
find_python() {
    local span version candidate
    span=($(python_span))
    if [ $# = 0 ]; then
        set -- python3
        for version in "${span[@]}"; do set -- "$1" "python$version" "${@:2}"; done
    fi
    for candidate in "$@"; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv)' \
            "${span[@]}" >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python ${span[0]} to ${span[${#span[@]} - 1]} with the venv module was found on PATH (tried: $*). Install one (on" \
        "Debian and Ubuntu: python3 and python3-venv), or set FSDP_QLORA_VENV to an environment that has one." >&2
    return 1
}
