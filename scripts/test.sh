#!/usr/bin/env bash
# Makes the environment if need be, then runs lint, format, types and tests. All of them run; the exit status is
# non-zero if one failed. Arguments go to pytest:
#
#     bash scripts/test.sh -k sampler
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
. scripts/setup_env.sh || exit

# The tests start several ranks themselves; more threads than cores would only slow them down. Two files at a time:
# many tests wait for a process to end or a limit to pass.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

failed=()
check() {
    local name="$1" start=$SECONDS
    shift
    printf '\n== %s: %s\n' "$name" "$*"
    "$@" || failed+=("$name")
    echo "== $name took $((SECONDS - start)) s"
}

check lint ruff check .
check format ruff format --check .
check types mypy
check tests python -m pytest -n 2 --dist loadfile "$@"

if ((${#failed[@]})); then
    printf '\nFAILED: %s\n' "${failed[*]}"
    exit 1
fi
printf '\nAll passed: lint, format, types, tests.\n'
