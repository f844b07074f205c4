"""Writes reference.json, the losses that a GPU must have: CUDA_VISIBLE_DEVICES= python -m
tests.gpu.make_reference

Cases that must have the losses of another one are left out. NAMES as arguments renew these only.
"""

import json
import sys
import tempfile
from pathlib import Path

import bitsandbytes
import torch
import transformers

from tests.gpu.cases import CASES, MODEL, REFERENCE, fingerprint, make_models
from tests.gpu.losses import run_cases
from tests.helpers.rows import make_rows, write_rows


def main(names: list[str]) -> int:
    if torch.cuda.is_available():
        sys.exit("The reference comes from a CPU: set CUDA_VISIBLE_DEVICES= (empty).")
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder) / "models")
        dataset = write_rows(Path(folder) / "rows.jsonl", make_rows(16))

        def inputs(model: str = MODEL) -> dict[str, object]:
            return {
                "model_name": models[model],
                "dataset": dataset,
                "log_to": "stdout",
                "quant_cache": "off",
            }

        cases = {
            name: case
            for name, case in CASES.items()
            if not case.same_as and (not names or name in names)
        }
        results = run_cases(cases, inputs, Path(folder))
        prints = {name: fingerprint(path) for name, path in models.items()}
    before = json.loads(REFERENCE.read_text())["losses"] if names and REFERENCE.exists() else {}
    for name, result in results.items():
        print(f"{name}: {result.losses or result.failure}")
    record = {
        "command": "CUDA_VISIBLE_DEVICES= python -m tests.gpu.make_reference",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bitsandbytes": bitsandbytes.__version__,
        "models": prints,
        "losses": before
        | {name: result.losses for name, result in results.items() if result.losses},
    }
    REFERENCE.write_text(json.dumps(record, indent=2) + "\n")
    return int(any(result.failure for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
