"""An independent single-process trainer: transformers + PEFT + bitsandbytes, plain PyTorch, no
FSDP.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
)

from fsdp_qlora.model.adapters.first_values import first_adapter_value

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### "
    "Input:\n{input}\n\n### Response:"
)


def load_base(folder: Path, *, four_bit: bool, auto: Any = AutoModelForCausalLM) -> torch.nn.Module:
    """The base model in fp32 compute, with bitsandbytes' own Linear4bit (NF4, double quantization)
    if asked.
    """
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    options = {"quantization_config": quantization, "device_map": "cpu"} if four_bit else {}
    model = auto.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    )
    return in_fp32(model)


def in_fp32(model: torch.nn.Module) -> torch.nn.Module:
    """Make Linear4bit compute in its compute dtype: in eval mode, on a CPU with AVX512-BF16, it
    takes bf16.
    """
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.training = True
    return model


@torch.no_grad()
def load_decoded_base(folder: Path, linears: Sequence[str] = LINEARS) -> torch.nn.Module:
    """The base model in fp32, its linear layers rounded to what NF4 with double quantization keeps
    of them.

    For what bitsandbytes' and PEFT's layers compute in bf16 whatever the model's dtype.
    """
    model = load_base(folder, four_bit=False)
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in linears:
            module.weight.copy_(decode(module.weight))
    return model


def decode(weight: torch.Tensor) -> torch.Tensor:
    """What NF4 with double quantization keeps of a weight of whole blocks."""
    options = {"blocksize": 64, "compress_statistics": True, "quant_type": "nf4"}
    codes, state = bnb.functional.quantize_4bit(weight.view(-1, 64), **options)
    return bnb.functional.dequantize_4bit(codes, state).view(weight.shape)


def load_adapter(base: torch.nn.Module, folder: Path) -> PeftModel:
    """The adapter as a user loads it. Every tensor of its file must have found its place."""
    model = PeftModel.from_pretrained(base, folder)
    return in_fp32(model.eval())


def encode(
    folder: Path, rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, labels) of each Alpaca row, [1, T], by the model's tokenizer or the given one."""
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(folder)
    encoded = []
    for row in rows:
        template = PROMPT_WITH_INPUT if row["input"] else PROMPT
        prompt = tokenizer(template.format(**row))["input_ids"]
        answer = tokenizer(row["output"], add_special_tokens=False)["input_ids"] + [
            tokenizer.eos_token_id
        ]
        ids = torch.tensor([prompt + answer])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        encoded.append((ids, labels))
    return encoded


def batch_loss(
    model: torch.nn.Module, batch: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Mean loss over the target tokens of all rows."""
    total = torch.zeros(())
    for ids, labels in batch:
        logits = model(input_ids=ids, use_cache=False).logits
        total = total + F.cross_entropy(
            logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum"
        )
    return total / sum(int((labels[:, 1:] != -100).sum()) for _, labels in batch)


def train_peft(
    base: torch.nn.Module,
    batch: list[tuple[torch.Tensor, torch.Tensor]],
    first_value: Callable[[str, torch.Size], torch.Tensor],
    *,
    steps: int,
    lr: float,
    lr_ratio: float = 1.0,
    **options: object,
) -> tuple[list[float], PeftModel]:
    """Full-batch AdamW steps of PEFT's own adapter on all linear layers of the blocks, clipped at
    norm 1.

    Args:
        first_value: of A and B, by name and shape.
        lr_ratio: the learning rate of B is this many times A's.
        options: of LoraConfig.
    Returns:
        The losses, and the trained model.
    """
    model = peft_model(base, **options)
    groups = []
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            parameter.data.copy_(first_value(name.replace(".default", ""), parameter.shape))
        if parameter.requires_grad:
            groups.append(
                {"params": [parameter], "lr": lr * (lr_ratio if "lora_B" in name else 1.0)}
            )
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = batch_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([group["params"][0] for group in groups], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def train_plainly(
    base: torch.nn.Module,
    batches: list[dict[str, torch.Tensor]],
    target_modules: str,
    sgd_lr: float = 0.0,
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Three full-batch steps of PEFT's adapter, by AdamW: losses, gradient norms, and the adapter.

    Args:
        batches: arguments of the model and labels, of a row each. target_modules: a pattern of all
        of a path. sgd_lr: of stochastic gradient descent instead.
    """
    count = sum(int((batch["labels"][0, 1:] != -100).sum()) for batch in batches)

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        return -torch.stack([answer_logps(model, batch).sum() for batch in batches]).sum() / count

    return train_on_loss(base, loss_of, target_modules, sgd_lr=sgd_lr)


def answer_logps(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Log-probabilities of the tokens with a label of one row, given to the model whole."""
    inputs = {
        name: value for name, value in batch.items() if name not in ("labels", "attention_mask")
    }
    logits = model(**inputs, use_cache=False).logits[0, :-1]
    labels = batch["labels"][0, 1:]
    return -F.cross_entropy(logits[labels != -100], labels[labels != -100], reduction="none")


def train_on_loss(
    base: torch.nn.Module,
    loss_of: Callable[[PeftModel], torch.Tensor],
    target_modules: str,
    *,
    steps: int = 3,
    sgd_lr: float = 0.0,
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The same for any loss of the model with PEFT's adapter."""
    model = peft_model(base, r=4, lora_alpha=6, target_modules=target_modules).train()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    for name, parameter in trained.items():
        parameter.data.copy_(
            first_adapter_value(name.replace(".default", ""), parameter.shape, seed=5)
        )
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        trained.values(), lr=1e-2, weight_decay=0.0
    )
    optimizer = torch.optim.SGD(trained.values(), lr=sgd_lr) if sgd_lr else optimizer
    losses = []
    norms = []
    for _ in range(steps):
        loss = loss_of(model)
        losses.append(loss.item())
        norms.append(step_plainly(optimizer, loss))
    return losses, norms, get_peft_model_state_dict(model)


def step_plainly(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """A step with a gradient of norm 1 at most; returns the norm before."""
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def peft_model(base: torch.nn.Module, **options: object) -> PeftModel:
    return get_peft_model(
        base, LoraConfig(**{"target_modules": list(LINEARS), "task_type": "CAUSAL_LM", **options})
    )
