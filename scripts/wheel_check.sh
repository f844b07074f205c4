#!/usr/bin/env bash
# Builds the wheel, installs it in a clean environment and uses it from an empty folder, away from any clone: --version,
# env, configs, train on two processes, the examples of docs/python_api.md, export, merge, generate, quantize, report. The
# libraries come from the environment of the python on PATH, so nothing is downloaded.
#
#     bash scripts/wheel_check.sh MODEL ROWS
#
# MODEL: a folder with a tiny model. ROWS: a file to train on.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
model="$(realpath "$1")" rows="$(realpath "$2")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# Built from a copy: setuptools leaves a folder build/ next to the sources.
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
fsdp-qlora configs
fsdp-qlora configs demo >mine.yaml
options=(--model_name "$model" --dataset "$rows" --max_steps 2 --quant_cache off --log_to stdout)
fsdp-qlora train --config mine.yaml "${options[@]}" --output_dir two --nproc_per_node 2

# The examples of the document, unchanged except for the model's name.
cp "$rows" rows.jsonl
sed -n '/^```python$/,/^```$/ { /^```/d; p }' "$root/docs/python_api.md" | sed "s|Qwen/Qwen3-8B-Base|$model|" >examples.py
cat >>examples.py <<'PYTHON'
assert (result.state, result.steps, len(result.losses)) == ("finished", result.steps, result.steps), result
assert result.steps > 0 and list(result.eval_losses) == [0, result.steps], result
try:
    train(model_nane="output")
except UserError as error:
    assert "did you mean model_name?" in str(error), error
else:
    raise AssertionError("an option that does not exist was not refused")
PYTHON
python examples.py | tee examples.txt
grep "^finished [0-9]" examples.txt
grep "^wrong input: " examples.txt
ls two/adapter_model.safetensors output/adapter_model.safetensors two/report.html output/report.html

# One process for these: the import of torch takes longer than they do.
python - "$model" <<'PYTHON'
import sys

from fsdp_qlora.__main__ import main

for words in (
    "env",
    "export two --out exported",
    "merge --adapter two --out merged",
    "generate --adapter merged --prompt river --max_new_tokens 2 --quant_cache off --nproc_per_node 1",
    "plan --model_name qwen3-0.6b --gpu RTX3060",
    f"quantize {sys.argv[1]} --out quantized",
    "report two output",
):
    assert main(words.split()) == 0, words
PYTHON
cmp exported/adapter_model.safetensors two/adapter_model.safetensors
ls merged/config.json merged/README.md quantized/config.json report.html
echo "The wheel works."
