"""Writes trl_distillation.json: what TRL's trainers log in five steps of learning from a teacher,
and the weights then.

In an environment that has TRL besides ours: python -m tests.preferences.make_distillation_numbers
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutputWithPast
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

from fsdp_qlora.data.batches.schedule import epoch_order
from fsdp_qlora.model.adapters.first_values import first_adapter_value
from tests.helpers.models import make_model
from tests.helpers.reference import LINEARS, encode
from tests.helpers.rows import make_rows
from tests.layers.test_divergence import grouped
from tests.preferences.pairs import plain_sgd, sketch
from tests.preferences.taught import CASES, FULL_LR, LORA, LR, ROWS, STEPS, TEACHER

Encoded = list[tuple[torch.Tensor, torch.Tensor]]


class Given(DistillationTrainer):  # type: ignore[misc]
    """Takes each prompt's completion from the rows in place of an engine."""

    rows: Encoded
    is_stored: bool

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        found = [self.rows[int(number)] for number in prompts]
        asked, answers = (
            [ids[(labels != -100) == side].tolist() for ids, labels in found]
            for side in (False, True)
        )
        return asked, answers, None, None, []


class Served(Given, ServerDistillationTrainer):  # type: ignore[misc]
    """Has the teacher here in place of a server."""

    def __init__(self, *args: Any, teacher_model: Any, **others: Any) -> None:
        DistillationTrainer.__init__(self, *args, **others)
        self.teacher = teacher_model
        self.loss_top_k = self.args.loss_top_k
        self.loss_add_tail = self.args.loss_add_tail

    @torch.no_grad()
    def _get_teacher_token_logprobs_from_server(
        self, inputs: Any, prompt_length: int
    ) -> dict[str, torch.Tensor]:
        logits = self.teacher(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).logits
        logps = logits[:, prompt_length - 1 : -1].double().log_softmax(-1)
        best = logps.topk(self.loss_top_k).indices
        told = grouped(logps, best)
        told = told.half().double().log_softmax(-1) if self.is_stored else told
        answers = inputs["input_ids"][:, prompt_length:, None]
        return {
            "topk_logprobs": told[..., :-1].float(),
            "topk_token_ids": best,
            "actual_logprobs": logps.gather(-1, answers)[..., 0],
        }


TRAINERS: dict[str, tuple[Any, Any]] = {
    "gkd": (GKDTrainer, GKDConfig),
    "distillation": (Given, DistillationConfig),
    "server": (Served, ServerDistillationConfig),
}


class Stored(torch.nn.Module):
    """Log-probabilities of a teacher as our files keep them, in float16, in the place of hidden
    states.
    """

    def __init__(self, teacher: Any, temperature: float) -> None:
        super().__init__()
        self.teacher = teacher
        self.temperature = temperature
        self.embed_tokens = teacher.model.embed_tokens

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any
    ) -> BaseModelOutputWithPast:
        logits = self.teacher(input_ids=input_ids, attention_mask=attention_mask).logits
        logps = (logits / self.temperature).log_softmax(-1).half().float()
        return BaseModelOutputWithPast(last_hidden_state=self.temperature * logps)


def load_teacher(folder: Path, temperature: float, *, is_stored: bool) -> Any:
    teacher = AutoModelForCausalLM.from_pretrained(folder)
    if is_stored:
        inside = AutoModelForCausalLM.from_pretrained(folder).eval()
        size = teacher.config.vocab_size
        teacher.model = Stored(inside, temperature)
        teacher.lm_head = torch.nn.Linear(size, size, bias=False)
        torch.nn.init.eye_(teacher.lm_head.weight)
    return teacher.eval()


def train(
    name: str, options: dict[str, Any], folder: Path, *, is_stored: bool = True
) -> dict[str, Any]:
    """The steps, and a sketch of what was trained."""
    base = make_model(folder / "student")
    teacher = make_model(folder / "teacher", **TEACHER)
    trainer_class, config_class = TRAINERS[name]
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    own = dict(options)
    is_full = own.pop("train_type", None) == "full"
    k = own.pop("top_k", None)
    # A server's loss is the mean of the micro-batches' means.
    batch_size = 4 if name == "server" else 2
    lr = FULL_LR if is_full else LR
    config = {**own, **plain_sgd(folder, steps=STEPS, lr=lr, batch_size=batch_size)}
    config["gradient_accumulation_steps"] = 4 // batch_size
    config |= (
        {"lmbda": 0.0, "train_sampling_strategy": "sequential"}
        if name == "gkd"
        else {"shuffle_dataset": False}
    )
    config |= (
        {"loss_top_k": k, "teacher_model_server_url": "http://localhost:1"}
        if name == "server"
        else {}
    )
    rows = encode(base, make_rows(ROWS))
    order = epoch_order(np.arange(ROWS), seed=42, epoch=0).tolist()
    masks = [(labels[0] != -100).long().tolist() for _, labels in rows]
    data = [
        {"prompt": f"{i}", "input_ids": rows[i][0][0].tolist(), "completion_mask": masks[i]}
        for i in order
    ]
    peft = (
        None if is_full else LoraConfig(**LORA, target_modules=list(LINEARS), task_type="CAUSAL_LM")
    )
    # of GKD it is that of sampling alone
    temperature = options.get("temperature", 1.0) if name != "gkd" else 1.0
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(base),
        teacher_model=load_teacher(teacher, temperature, is_stored=is_stored and name != "server"),
        args=config_class(**config),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
        peft_config=peft,
    )
    trainer.rows = rows
    trainer.is_stored = is_stored
    with torch.no_grad():
        for parameter_name, parameter in trainer.model.named_parameters():
            if peft and parameter.requires_grad:
                parameter_name = parameter_name.replace(".default", "")
                parameter.copy_(first_adapter_value(parameter_name, parameter.shape, seed=42))
    trainer.train()
    logged = [record for record in trainer.state.log_history if "grad_norm" in record]
    steps = [{key: record[key] for key in ("loss", "grad_norm")} for record in logged]
    trainer.model.save_pretrained(folder / "trained")
    return {"steps": steps, "sketch": sketch(folder / "trained")}


def main() -> None:
    found: dict[str, Any] = {"trl": trl.__version__}
    with tempfile.TemporaryDirectory() as folder:
        for case, (name, options) in CASES.items():
            found[case] = train(name, options, Path(folder) / f"{len(found)}")
            if options.get("train_type") != "full":
                exact = train(name, options, Path(folder) / f"{len(found)}_exact", is_stored=False)
                found[case]["exact"] = [step["loss"] for step in exact["steps"]]
            print(case, *found[case]["steps"], file=sys.stderr, sep="\n")
    lines = ",\n".join(
        f"{json.dumps(case)}: {json.dumps(values)}" for case, values in found.items()
    )
    Path(__file__).with_name("trl_distillation.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
