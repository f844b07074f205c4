"""Dynamic fine-tuning: the loss of each token times its probability, as a plain loop in float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from fsdp_qlora.model.adapters.first_values import first_adapter_value
from tests.helpers.metrics import read_metrics
from tests.helpers.reference import load_base, peft_model
from tests.helpers.rounding import SGD
from tests.helpers.run import all_slow_but, train_ok
from tests.parity.test_turn_weights import CHATS, weighted_tokens

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {"batch_size": 4}),
    "2 ranks, accumulation": (2, {"batch_size": 1, "gradient_accumulation_steps": 2}),
    "2 ranks share rows": (2, {"batch_size": 4, "context_parallel_size": 2}),
    "bf16": (2, {"batch_size": 1, "gradient_accumulation_steps": 2, "precision": "bf16"}),
}
STEPS = 4


def write_chats(path: Path) -> Path:
    """The rows of CHATS as messages, with the weights of their answers."""
    rows = []
    for chat in CHATS:
        messages = []
        for question, answer, weight in chat:
            of_weight = {} if weight is None else {"weight": weight}
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer} | of_weight)
        rows.append({"messages": messages})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def losses_of(folder: Path) -> tuple[list[float], float]:
    """The losses of a plain loop in float64, and the mean cross entropy after its last step."""
    base = load_base(folder, four_bit=False).double()
    model = peft_model(base, r=4, lora_alpha=6).double()
    trained = {key: each for key, each in model.named_parameters() if each.requires_grad}
    for key, parameter in trained.items():
        first = first_adapter_value(key.replace(".default", ""), parameter.shape, seed=5)
        parameter.data.copy_(first)
    optimizer = torch.optim.SGD(trained.values(), lr=SGD["lr"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = [weighted_tokens(tokenizer, chat, learns_all=False) for chat in CHATS]
    divisor = sum(weights[1:].sum() for _, weights in batch)

    def mean(*, by_probability: bool) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for ids, weights in batch:
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            losses = F.cross_entropy(logits, ids[0, 1:], reduction="none")
            if by_probability:
                probabilities = logits.softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                losses = probabilities.detach() * losses
            total = total + losses @ weights[1:]
        return total / divisor

    found = []
    for _ in range(STEPS):
        loss = mean(by_probability=True)
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found, mean(by_probability=False).item()


@pytest.mark.parametrize("name", all_slow_but("2 ranks, accumulation", CASES, nightly=["1 rank"]))
def test_losses_by_probability_are_those_of_a_plain_loop(name, models, tmp_path):
    ranks, options = CASES[name]
    folder = models()
    data = write_chats(tmp_path / "chats.jsonl")
    common = {"train_type": "lora", "lora_rank": 4, "lora_alpha": 6, "precision": "fp32"}
    common |= {"seed": 5, "num_epochs": STEPS, "grad_norm": 0, "prompt_template": "user_assistant"}
    train_ok(
        ranks,
        tmp_path / "out",
        model_name=folder,
        dataset=data,
        eval_dataset=data,
        loss_type="dft",
        **SGD | common | options,
    )
    losses, cross_entropy = losses_of(folder)
    assert len({*losses}) == STEPS
    tolerance = 2e-2 if name == "bf16" else 1e-6
    assert read_metrics(tmp_path / "out") == pytest.approx(losses, rel=tolerance)
    [*_, after] = read_metrics(tmp_path / "out", "eval_loss")
    assert after == pytest.approx(cross_entropy, rel=tolerance)
