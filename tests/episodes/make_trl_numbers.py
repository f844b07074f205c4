"""Writes trl_episodes.json: what TRL's GRPOTrainer makes of scripted turns in an environment.

In an environment that has TRL besides ours: python -m tests.episodes.make_trl_numbers
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl import chat_template_utils as templates

from tests.episodes.agent import (
    ANSWERS,
    LONGEST,
    LR,
    PROMPTS,
    STEPS,
    digest,
    make_agent,
    scripted,
    token_ids,
    write_inputs,
)
from tests.preferences.answers import make_adapter
from tests.preferences.pairs import plain_sgd, sketch

KEPT = ("loss", "grad_norm", "reward", "completions/", "tools/")


class Scripted(GRPOTrainer):  # type: ignore[misc]
    """Has the turns of the script instead of the model's."""

    def __init__(self, folder: Path, *args: Any, **options: Any) -> None:
        self.folder = folder
        self.generation = -1
        self.found: list[dict[str, Any]] = []
        super().__init__(*args, **options)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **options: Any) -> Any:
        if not options.get("has_tool_images") and len(args) == 3:
            self.generation += 1
            self.turns = [0] * len(prompt_ids)
            self.begins = [[*ids] for ids in prompt_ids]
        places = self.places_of(prompt_ids)
        written = []
        for place in places:
            text = scripted(self.generation, place, self.turns[place])
            written.append(token_ids(self.folder, text))
            self.turns[place] += 1
        return written, None

    def places_of(self, prompt_ids: Any) -> list[int]:
        """The places of the episodes that go on: those whose last turn calls a tool."""
        if not any(self.turns):
            return [*range(len(prompt_ids))]
        places = [
            place
            for place, turn in enumerate(self.turns)
            if "<tool_call>" in scripted(self.generation, place, turn - 1)
            and turn == max(self.turns)
        ]
        assert len(places) == len(prompt_ids)
        return places

    def _generate(self, prompts: Any, *args: Any) -> Any:
        result = super()._generate(prompts, *args)
        prompt_ids, completion_ids, masks = result[:3]
        for parts in zip(prompt_ids, completion_ids, masks, strict=True):
            self.found.append(
                dict(zip(("prompt", "completion", "mask"), map(digest, parts), strict=True))
            )
        return result


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = make_agent(folder / "base")
        adapter = make_adapter(base, folder / "start")
        file, rows = write_inputs(folder)
        spec = importlib.util.spec_from_file_location("shelf", file)
        assert spec and spec.loader
        shelf = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(shelf)
        tokenizer = AutoTokenizer.from_pretrained(base)
        # TRL knows the form of calls by the original template alone.
        tokenizer.response_template = templates.qwen3_template
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            adapter,
            is_trainable=True,
        )
        config = GRPOConfig(
            **plain_sgd(folder, steps=STEPS, lr=LR, batch_size=PROMPTS * ANSWERS),
            num_generations=ANSWERS,
            max_completion_length=LONGEST,
            shuffle_dataset=False,
        )
        trainer = Scripted(
            base,
            model,
            [],
            args=config,
            train_dataset=Dataset.from_json(str(rows)),
            processing_class=tokenizer,
            environment_factory=shelf.Shelf,
        )
        trainer.train()
        steps = [
            {key: value for key, value in record.items() if key.startswith(KEPT)}
            for record in trainer.state.log_history
            if "grad_norm" in record
        ]
        trainer.model.save_pretrained(folder / "trained")
        found = {
            "trl": trl.__version__,
            "rows": trainer.found,
            "steps": steps,
            "adapter": sketch(folder / "trained"),
        }
    print(*steps, file=sys.stderr, sep="\n")
    Path(__file__).with_name("trl_episodes.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
