#!/usr/bin/env bash
# The chaos tests, longer than in CI: 20 kills per run instead of 4, in ROUNDS rounds (3) with different seeds.
#
#     bash scripts/chaos.sh
#     CHAOS_SEED=1700000000 bash scripts/chaos.sh    # repeat the kills of the run that printed this seed
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
. scripts/setup_env.sh || exit
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CHAOS_KILLS="${CHAOS_KILLS:-20}"

python -m pytest -s tests/chaos tests/mirrors || exit
for ((round = 2; round <= ${ROUNDS:-3}; round++)); do
    python -m pytest -s tests/chaos/test_kills.py -k random || exit
done
