"""Show what a run achieved, with nothing but its output folder, transformers and PEFT.

    python scripts/demo_report.py --model_name demo/model --output_dir demo/output

Prints the held-out loss at the first and the last evaluation, loads the adapter with
`peft.PeftModel.from_pretrained` on the unquantized base in this one process, compares the loaded
tensors with the file, and generates an answer without and with the adapter. Exit status 1 if the
held-out loss did not fall by --min_drop, or the adapter is not what is in the file, or it changes
nothing.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_qlora.data.text.formats import read_fields
from fsdp_qlora.data.text.templates import TEMPLATES

# The output is not used; a row of the format has one.
QUESTION = {"instruction": "Explain why leaves change colour in autumn.", "output": "-"}


def held_out_losses(metrics: Path) -> list[tuple[int, float]]:
    """(step, loss in nats per target token) of every evaluation in a run's metrics.jsonl."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]


def check_held_out_loss(metrics: Path, min_drop: float) -> bool:
    losses = held_out_losses(metrics)
    if len(losses) < 2:
        print(
            f"FAILED: {metrics} has {len(losses)} evaluations; one before and one after are "
            "compared."
        )
        return False
    first_step, first = losses[0]
    last_step, last = losses[-1]
    passed = first - last >= min_drop
    print(
        f"Held-out loss: {first:.4f} before (step {first_step}), {last:.4f} after (step "
        f"{last_step}), lower by {first - last:.4f} nats per token; at least {min_drop} is "
        f"expected: {'passed' if passed else 'FAILED'}"
    )
    return passed


def check_tensors(model: PeftModel, adapter: Path) -> bool:
    """Whether the adapter in `model` is the one in the file, tensor by tensor."""
    on_disk = load_file(adapter / "adapter_model.safetensors")
    # "auto" asks the hub for the base
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    different = [
        name
        for name in on_disk.keys() | loaded.keys()
        if name not in on_disk
        or name not in loaded
        or not torch.equal(on_disk[name], loaded[name].cpu())
    ]
    if different:
        print(
            f"FAILED: {len(different)} tensors differ between file and model, such as "
            f"{min(different)}"
        )
        return False
    print(f"Adapter loaded by PEFT: {len(loaded)} tensors, all equal to the file")
    return True


@torch.inference_mode()
def check_logits(model: PeftModel, inputs: dict[str, torch.Tensor]) -> bool:
    with model.disable_adapter():
        base = model(**inputs).logits
    difference = (model(**inputs).logits - base).abs().max().item()
    passed = 0 < difference < float("inf")
    print(
        f"Largest logit difference to the base: {difference:.4f}: "
        f"{'passed' if passed else 'FAILED'}"
    )
    return passed


def generate(
    model: PeftModel, tokenizer: Any, inputs: dict[str, torch.Tensor], max_new_tokens: int
) -> str:
    output = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.decode(
        output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    ).strip()


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model_name", required=True, help="the base that was fine-tuned")
    parser.add_argument("--output_dir", type=Path, required=True, help="output_dir of the run")
    parser.add_argument(
        "--min_drop", type=float, default=0.3, help="minimum fall of the held-out loss, in nats"
    )
    parser.add_argument(
        "--max_new_tokens", type=int, default=80, help="maximum tokens of the generated answers"
    )
    arguments = parser.parse_args()

    passed = [check_held_out_loss(arguments.output_dir / "metrics.jsonl", arguments.min_drop)]
    tokenizer = AutoTokenizer.from_pretrained(arguments.output_dir)
    base = AutoModelForCausalLM.from_pretrained(arguments.model_name, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, arguments.output_dir).eval()
    prompt = (
        TEMPLATES["alpaca"].fill(read_fields(QUESTION, "instruction", "output", "input"))[0].text
    )
    inputs = dict(tokenizer(prompt, return_tensors="pt"))
    passed += [check_tensors(model, arguments.output_dir), check_logits(model, inputs)]

    print(f"\nInstruction: {QUESTION['instruction']}")
    with model.disable_adapter():
        print(f"\n-- Before:\n{generate(model, tokenizer, inputs, arguments.max_new_tokens)}")
    print(f"\n-- After:\n{generate(model, tokenizer, inputs, arguments.max_new_tokens)}")
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
