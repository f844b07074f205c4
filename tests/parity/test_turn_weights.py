"""Turns with weights of their own: the mean over targets by their weights, as a plain loop in
float64 has it.
"""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoTokenizer

from fsdp_qlora.model.adapters.first_values import first_adapter_value
from tests.helpers.metrics import read_metrics
from tests.helpers.reference import load_base, peft_model, step_plainly
from tests.helpers.run import all_slow_but, train_ok

CHATS = [  # (question, answer, weight)
    [("sort the list", "blue red", 0.5), ("please write", "seven", None)],
    [
        ("name a river", "water", 2),
        ("which colour", "green blue", 0),
        ("number", "seven red", 0.25),
    ],
    [("answer", "mountain", None)],
    [("question please", "list name river", 1)],
]
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {"batch_size": 4}),
    "2 ranks, accumulation": (2, {"batch_size": 1, "gradient_accumulation_steps": 2}),
    "2 ranks, padded": (2, {"batch_size": 2, "batching": "padded"}),
    "2 ranks, all text": (2, {"batch_size": 2, "learn": "all"}),
    "2 ranks, trained head": (2, {"batch_size": 2, "modules_to_save": "lm_head"}),
}


def weighted_tokens(
    tokenizer: Any, chat: Any, *, learns_all: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of a chat in the template user_assistant, and the weight of each."""
    parts = [("<s>", float(learns_all))]
    for question, answer, weight in chat:
        parts.append((f"User: {question}\nAssistant:", float(learns_all)))
        parts += [
            (f" {answer}</s>", 1.0 if weight is None else float(weight)),
            ("\n", float(learns_all)),
        ]
    text = "".join(part for part, _ in parts)
    of_letters = [weight for part, weight in parts for _ in part]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    weights = [of_letters[start] for start, _ in encoded["offset_mapping"]]
    return torch.tensor([encoded["input_ids"]]), torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize(
    "name", all_slow_but("2 ranks, accumulation", CASES, nightly=["1 rank", "2 ranks, all text"])
)
def test_the_loss_is_the_mean_by_weights(name, models, tmp_path):
    (ranks, options) = CASES[name]
    folder = models()
    data = tmp_path / "chats.jsonl"
    rows = [
        [
            turn
            for question, answer, weight in chat
            for turn in (
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer}
                | ({} if weight is None else {"weight": weight}),
            )
        ]
        for chat in CHATS
    ]
    data.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    common = {
        "model_name": folder,
        "dataset": data,
        "prompt_template": "user_assistant",
        "train_type": "lora",
    }
    common |= {
        "precision": "fp32",
        "lr": 1e-2,
        "lr_scheduler": "constant",
        "warmup": 0,
        "seed": 5,
        "num_epochs": 4,
    }
    train_ok(ranks, tmp_path / "out", **common, lora_rank=4, lora_alpha=6, **options)

    saved = ["lm_head"] if "modules_to_save" in options else None
    model = peft_model(
        load_base(folder, four_bit=False).double(), r=4, lora_alpha=6, modules_to_save=saved
    ).double()
    trained = {key: each for key, each in model.named_parameters() if each.requires_grad}
    for key, parameter in trained.items():
        if "lora" in key:
            parameter.data.copy_(
                first_adapter_value(key.replace(".default", ""), parameter.shape, seed=5)
            )
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.0)
    losses = list[float]()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    learns_all = options.get("learn") == "all"
    batch = [weighted_tokens(tokenizer, chat, learns_all=learns_all) for chat in CHATS]
    for _ in range(4):
        total = torch.zeros((), dtype=torch.float64)
        for ids, weights in batch:
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits, ids[0, 1:], reduction="none") @ weights[1:]
        loss = total / sum(weights[1:].sum() for _, weights in batch)
        losses.append(loss.item())
        step_plainly(optimizer, loss)
    assert read_metrics(tmp_path / "out") == pytest.approx(losses, rel=1e-5)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    for key, value in get_peft_model_state_dict(model).items():
        assert (found[key] - value).abs().max() < 1e-4, key
