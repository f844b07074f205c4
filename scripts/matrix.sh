#!/usr/bin/env bash
# Runs the program at the two ends of what pyproject.toml promises: the lowest Python with the lowest version of every
# library, and the highest Python with the newest versions that the index has. Prints a table: what ran, in how many
# minutes. Linux x86-64; on the CPU, with torch's CUDA build and without NVIDIA's libraries (scripts/phantom.sh).
#
#     bash scripts/matrix.sh                  # both ends, all checks
#     bash scripts/matrix.sh lowest quick     # an end and checks by name
#
# The Pythons are looked for on PATH; an end whose Python is not there takes the next, as the table says.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT

quick=(-m quick -n 2 --dist worksteal)
# What scripts/demo.sh does, on a tiny model.
demo=(--slow tests/test_readme.py -k the_demo_runs)
# Every command that the documents name, and the wheel's; those that only say something are in the quick tier.
commands=(--slow tests/test_readme.py tests/commands/test_wheel.py -k "every_train_command or every_command or the_wheel")

named=" ${*:-lowest newest} "
ends=() checks=()
for name in lowest newest; do [[ "$named" != *" $name "* ]] || ends+=("$name"); done
for name in quick demo commands; do [[ "$named" != *" $name "* ]] || checks+=("$name"); done
((${#ends[@]})) || ends=(lowest newest)
((${#checks[@]})) || checks=(quick demo commands)

versions() {
    "$1" -c 'import importlib.metadata as m, platform
names = "torch", "transformers", "peft", "bitsandbytes", "datasets"
print(" | ".join([platform.python_version(), ", ".join(f"{name} {m.version(name)}" for name in names)]))'
}

# Run pytest in the environment, print its output, and a cell for the table.
check() {
    local start=$SECONDS status
    printf '\n== %s, %s\n' "$end" "$1"
    env PATH="$venv/bin:$PATH" LD_LIBRARY_PATH="$venv/phantom" CUDA_VISIBLE_DEVICES= FSDP_QLORA_PHANTOM="$venv" \
        "$venv/bin/python" -m pytest "${@:2}" | tee "$log"
    status=$?
    ((status == 0)) || failed+=("$end: $1")
    row+=" $(tail -1 "$log" | sed 's/ in .*//'), $(((SECONDS - start + 30) / 60)) min |"
}

failed=() rows=()
for end in "${ends[@]}"; do
    venv="$PWD/.venv-phantom"
    [ "$end" = lowest ] || venv="$PWD/.venv-newest"
    if ! FSDP_QLORA_PHANTOM="$venv" bash scripts/phantom.sh "$end"; then
        failed+=("$end: environment")
        continue
    fi
    row="| $(versions "$venv/bin/python") |"
    for name in "${checks[@]}"; do
        declare -n arguments="$name"
        check "$name" "${arguments[@]}"
    done
    rows+=("$row")
done

printf '\n| Python | libraries |%s\n|%s\n' "$(printf ' %s |' "${checks[@]}")" "$(printf -- '---|%.0s' 1 2 "${checks[@]}")"
printf '%s\n' "${rows[@]}"
if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
