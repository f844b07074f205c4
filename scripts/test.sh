#!/usr/bin/env bash
# Makes the environment if need be, then runs lint, format, types and tests. All of them run; the exit status is
# non-zero if one failed. The word `static` runs all but the tests, `tests` the tests alone. Other arguments go to
# pytest:
#
#     bash scripts/test.sh
#     bash scripts/test.sh -k sampler
#     bash scripts/test.sh tests --slow
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
. scripts/setup_env.sh || exit

# The tests start several ranks themselves; more threads than cores would only slow them down. Three tests at a time on
# two cores: many wait for a process to end or a limit to pass.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

parts=(lint format types tests)
case "${1:-}" in
    static) parts=(lint format types) && shift ;;
    tests) parts=(tests) && shift ;;
esac
lint=(ruff check .)
format=(ruff format --check .)
types=(mypy)
tests=(python -m pytest -n 3 --dist worksteal "$@")

failed=()
for part in "${parts[@]}"; do
    declare -n command="$part"
    start=$SECONDS
    printf '\n== %s: %s\n' "$part" "${command[*]}"
    "${command[@]}" || failed+=("$part")
    echo "== $part took $((SECONDS - start)) s"
done

if ((${#failed[@]})); then
    printf '\nFAILED: %s\n' "${failed[*]}"
    exit 1
fi
printf '\nAll passed: %s.\n' "${parts[*]}"
