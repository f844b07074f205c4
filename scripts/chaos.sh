#!/usr/bin/env bash
# The chaos tests, longer than in CI: random faults for CHAOS_MINUTES (30) on two ranks, in as many runs as it takes.
#
#     bash scripts/chaos.sh
#     CHAOS_SEED=1700000000 bash scripts/chaos.sh -k random    # only these, as in the run that printed this seed
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
. scripts/setup_env.sh || exit
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CHAOS_MINUTES="${CHAOS_MINUTES:-30}"

python -m pytest -s --slow tests/chaos tests/mirrors "$@"
