#!/usr/bin/env bash
# Builds the wheel, installs it in a clean environment and uses it from an empty folder, away from any clone: --version,
# env, configs, train on one and two processes and from Python, quantize, report. The libraries come from the environment
# of the python on PATH, so nothing is downloaded.
#
#     bash scripts/wheel_check.sh MODEL ROWS
#
# MODEL: a folder with a tiny model. ROWS: a file to train on.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
model="$(realpath "$1")" rows="$(realpath "$2")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# Built from a copy: setuptools leaves a folder build/ beside the sources.
mkdir "$work/source"
cp -r "$root/fsdp_qlora" "$root/pyproject.toml" "$root/README.md" "$root/LICENSE" "$work/source"
python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$work" "$work/source"
python -m venv --without-pip "$work/venv"
site="$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# Under the wheel's own files, so that they win over an editable installation.
python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/libraries.pth"
python -m pip --python "$work/venv/bin/python" install --quiet --disable-pip-version-check --no-deps --no-index --ignore-installed \
    "$work"/fsdp_qlora-*.whl

mkdir "$work/empty"
cd "$work/empty"
unset PYTHONPATH
export PATH="$work/venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
case "$(python -c 'import fsdp_qlora; print(fsdp_qlora.__file__)')" in "$work"/venv/*) ;; *) exit 1 ;; esac
fsdp-qlora --version
fsdp-qlora env >env.txt
fsdp-qlora configs
fsdp-qlora configs demo >mine.yaml
options=(--model_name "$model" --dataset "$rows" --max_steps 2 --quant_cache off --log_to stdout)
fsdp-qlora train --config mine.yaml "${options[@]}" --output_dir one --world_size 1
python - "$model" "$rows" <<'PYTHON'
import sys
from fsdp_qlora import UserError, train

model, rows = sys.argv[1:]
result = train(
    model_name=model, dataset=rows, max_steps=2, quant_cache="off", world_size=2, output_dir="two", eval_fraction=0.1
)
assert (result.state, result.steps, len(result.losses), list(result.eval_losses)) == ("finished", 2, 2, [0, 2]), result
try:
    train(model_nane=model)
except UserError as error:
    assert "did you mean model_name?" in str(error), error
else:
    raise AssertionError("an option that does not exist was not refused")
PYTHON
ls one/adapter_model.safetensors two/adapter_model.safetensors one/report.html two/report.html
fsdp-qlora quantize "$model" --out quantized
fsdp-qlora report one two
ls quantized/config.json report.html
echo "The wheel works."
