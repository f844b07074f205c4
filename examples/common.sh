# Sourced by the examples' run.sh: goes to the clone's root, where demo/model is made unless it is there.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python scripts/demo_model.py --output_dir demo/model
