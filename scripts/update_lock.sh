#!/usr/bin/env bash
# Writes requirements.lock: every package with the hashes of its files, in the versions of the active environment, with
# which the tests were run. Needs uv (pip install uv). To install from it:
#
#     pip install --require-hashes -r requirements.lock && pip install --no-deps .
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tested="$(mktemp)"
trap 'rm -f "$tested"' EXIT
python - >"$tested" <<'PYTHON'
import importlib.metadata as metadata

for package in ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "datasets", "hqq", "wandb", "safetensors",
                "tokenizers", "huggingface_hub", "numpy", "pyarrow"):
    print(f"{package}=={metadata.version(package).partition('+')[0]}")
PYTHON
uv pip compile --quiet --universal --generate-hashes --no-annotate --no-header --no-emit-index-url \
    --extra wandb --extra hqq --constraint "$tested" pyproject.toml --output-file requirements.lock
echo "requirements.lock: $(grep -c '^[a-z].*==' requirements.lock) packages"
