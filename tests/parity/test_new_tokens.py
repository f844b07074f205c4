"""--add_tokens beside PEFT's trainable_token_indices: losses, rows, files; tied and untied, 1 and 2
ranks.
"""

import filecmp
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from fsdp_qlora.__main__ import main
from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.data.text.rendering import describe_lack
from fsdp_qlora.data.text.templates import CHAT_TEMPLATES
from fsdp_qlora.model.adapters.first_values import first_adapter_value
from fsdp_qlora.model.adapters.token_rows import add_tokens
from fsdp_qlora.run.train import run
from fsdp_qlora.utils.errors import UserError
from tests.helpers.metrics import read_metrics
from tests.helpers.models import PROBE
from tests.helpers.reference import encode, load_adapter, load_base, train_peft
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags, train_ok

TOKENS = ("<think>", "</think>: number answer")
STEPS = 4
NIGHTLY = ("2 ranks, 16 bits", "1 rank, tied")


class Case(NamedTuple):
    """A run on so many ranks. model: what differs from a llama with 320 rows and tied
    embeddings.
    """

    ranks: int
    model: dict[str, Any]
    options: dict[str, Any] = {}  # noqa: RUF012
    tolerance: float = 1e-5
    of_weights: float = 1e-5  # Adam makes of a gradient's rounding a step of the learning rate
    family: str = "llama"


CASES = {
    "1 rank, tied": Case(1, {}),
    "2 ranks, tied, in 4 bits": Case(2, {}, {"train_type": "qlora"}),
    "2 ranks, head of its own, accumulation": Case(
        2, {"tie_word_embeddings": False}, {"batch_size": 1, "gradient_accumulation_steps": 2}
    ),
    "1 rank, head of its own, rows to spare": Case(
        1, {"tie_word_embeddings": False, "vocab_size": 336}
    ),
    "2 ranks, 16 bits": Case(2, {"tie_word_embeddings": False}, {"precision": "bf16"}, 2e-2, 4e-2),
    "2 ranks, scaled rows, capped logits": Case(
        2, {"final_logit_softcapping": 2.0}, family="gemma2"
    ),
}


def rows_with_tokens() -> list[dict[str, str]]:
    rows = make_rows(4, seed=3)
    for row in rows[::2]:
        row["instruction"] = f"<think> {row['instruction']}"
    return [row | {"output": f"{row['output']} </think> blue"} for row in rows]


@torch.no_grad()
def with_first_rows(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[nn.Module, list[int]]:
    """The base as PEFT's users grow it, with the means that our rows start from, and the new
    tokens.
    """
    known = AutoTokenizer.from_pretrained(folder)
    base = load_base(folder, four_bit=False)
    if len(tokenizer) > base.config.vocab_size:
        base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    ids = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    described = known.encode("number answer", add_special_tokens=False)
    for module in {base.get_input_embeddings(), base.get_output_embeddings()}:
        means = [module.weight[rows].double().mean(0) for rows in (slice(len(known)), described)]
        module.weight[ids] = torch.stack(means).float()
    return base, ids


@pytest.mark.parametrize(
    "name", all_slow_but("2 ranks, head of its own, accumulation", CASES, NIGHTLY)
)
def test_rows_of_new_tokens_train_as_pefts(name, models, tmp_path):
    case = CASES[name]
    rows = rows_with_tokens()
    out = tmp_path / "out"
    folder = models(case.family, **{"tie_word_embeddings": True, **case.model})
    data = write_rows(tmp_path / "rows.jsonl", rows)
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("\n".join(TOKENS))
    options = {
        "batch_size": 4 // case.ranks,
        "train_type": "lora",
        "precision": "fp32",
        **case.options,
    }
    options |= {
        "lr_scheduler": "constant",
        "warmup": 0,
        "seed": 5,
        "lora_rank": 4,
        "lora_alpha": 6,
        "lr": 1e-2,
    }
    options |= {"model_name": folder, "dataset": data, "num_epochs": STEPS, "add_tokens": tokens}
    output = train_ok(
        case.ranks, out, logits_file=tmp_path / "logits", context_length=256, **options
    )
    num_rows = max(case.model.get("vocab_size", 320), 322)
    assert f"2 of the {num_rows} rows of model.embed_tokens train (2.00 KiB with" in output

    tokenizer = AutoTokenizer.from_pretrained(out)  # saved with the adapter
    base, ids = with_first_rows(folder, tokenizer)
    if options["train_type"] == "qlora":
        base = with_first_rows_in_4_bits(folder, base)
    is_tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    of_modules = dict.fromkeys(["embed_tokens"] if is_tied else ["embed_tokens", "lm_head"], ids)
    losses, trained = train_peft(
        base,
        encode(folder, rows, tokenizer),
        lambda name, shape: first_adapter_value(name, shape, seed=5),
        steps=STEPS,
        lr=1e-2,
        r=4,
        lora_alpha=6,
        trainable_token_indices=of_modules,
    )
    assert losses[-1] < losses[0] - 0.5
    assert read_metrics(out) == pytest.approx(losses, rel=case.tolerance)
    saved = load_file(out / "adapter_model.safetensors")
    theirs = get_peft_model_state_dict(trained, save_embedding_layers=False)
    assert saved.keys() == theirs.keys()
    assert sum(".token_adapter." in key for key in saved) == 2 - is_tied
    for key, value in theirs.items():
        assert (saved[key] - value).abs().max() < case.of_weights, key

    plain = load_base(folder, four_bit=False)
    if num_rows > plain.config.vocab_size:
        plain.resize_token_embeddings(num_rows)
    if options["train_type"] == "qlora":
        plain = with_first_rows_in_4_bits(folder, plain)
    with torch.no_grad():
        logits = load_adapter(plain, out)(input_ids=PROBE).logits
    assert (logits - load_file(tmp_path / "logits")["logits"]).abs().max() < 20 * case.tolerance


def with_first_rows_in_4_bits(folder: Path, grown: nn.Module) -> nn.Module:
    """bitsandbytes' base, with the embeddings of a grown one."""
    base = load_base(folder, four_bit=True)
    base.resize_token_embeddings(len(grown.get_input_embeddings().weight), mean_resizing=False)
    base.get_input_embeddings().weight.data.copy_(grown.get_input_embeddings().weight)
    return base


def test_a_resumed_run_is_merged_and_exported_with_its_new_tokens(models, tmp_path):
    folder = models()
    data = write_rows(tmp_path / "rows.jsonl", rows_with_tokens())
    options = {
        "model_name": folder,
        "dataset": data,
        "add_tokens": ",".join(TOKENS),
        "train_type": "lora",
        "lr": 1e-2,
    }
    options |= {
        "save_every": 2,
        "num_epochs": 2,
        "batch_size": 1,
        "optimizer": "adamw",
        "context_length": 256,
    }
    train_ok(1, tmp_path / "whole", logits_file=tmp_path / "logits", **options)
    shutil.copytree(tmp_path / "whole" / "checkpoints" / "step_000006", tmp_path / "step")
    train_ok(1, tmp_path / "resumed", resume=tmp_path / "step", **options)
    weights = "adapter_model.safetensors"
    assert filecmp.cmp(tmp_path / "whole" / weights, tmp_path / "resumed" / weights, shallow=False)

    assert main(["export", str(tmp_path / "whole"), "--out", str(tmp_path / "exported")]) == 0
    for name in (weights, "tokenizer.json", "adapter_config.json"):
        assert filecmp.cmp(
            tmp_path / "whole" / name, tmp_path / "exported" / name, shallow=False
        ), name

    merge = ["merge", "--adapter", str(tmp_path / "exported"), "--model_name", str(folder)]
    assert main([*merge, "--out", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        found = merged(input_ids=PROBE).logits
    assert found.shape[-1] == len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == 322
    assert (found - load_file(tmp_path / "logits")["logits"]).abs().max() < 1e-4

    further = {
        **options,
        "add_tokens": "none",
        "num_epochs": 1,
        "adapter": tmp_path / "exported",
        "lr": 1e-9,
    }
    train_ok(2, tmp_path / "further", logits_file=tmp_path / "further.logits", **further)
    kept = load_file(tmp_path / "further.logits")["logits"]
    assert (kept - found).abs().max() < 1e-4


def test_a_peft_adapter_with_a_grown_vocabulary_is_merged(models, tmp_path):
    folder = models("llama", tie_word_embeddings=True)
    base = load_base(folder, four_bit=False)
    base.resize_token_embeddings(322)
    config = LoraConfig(
        target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 320, 321]}
    )
    theirs = get_peft_model(base, config)
    for name, parameter in theirs.named_parameters():
        if "delta" in name:
            nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path / "adapter")
    assert (
        main(["merge", "--adapter", str(tmp_path / "adapter"), "--out", str(tmp_path / "merged")])
        == 0
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([[5, 320, 3, 321, 9]])
    with torch.no_grad():
        assert (merged(input_ids=ids).logits - theirs(input_ids=ids).logits).abs().max() < 1e-4


def test_a_template_with_tokens_that_the_base_lacks_names_the_option(models):
    tokenizer = AutoTokenizer.from_pretrained(models())
    chatml = {"kind": "chat", "chat_template": CHAT_TEMPLATES["chatml"]}
    assert "no tokens for <|im_start|>, <|im_end|>" in describe_lack(chatml, tokenizer)
    tokenizer, _ = add_tokens(tokenizer, ["<|im_start|>", "<|im_end|>"], 320)
    assert not describe_lack(chatml, tokenizer) and not describe_lack({"kind": "text"}, tokenizer)


def test_tokens_that_the_model_has_start_from_their_rows(models):
    known = AutoTokenizer.from_pretrained(models())
    tokenizer, tokens = add_tokens(known, ["<new>", "sort", "<other>: list name"], 330)
    assert len(known) == 320 and len(tokenizer) == 322 and tokenizer.encode("<new>")[1:] == [320]
    own = known.convert_tokens_to_ids("sort")
    described = tuple(known.encode("list name", add_special_tokens=False))
    assert tokens.ids == (own, 320, 321) and tokens.starts == ((own,), range(320), described)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules_to_save": "embed_tokens"}, "Give one of them"),
        ({"objective": "dpo"}, "it cannot be used with --add_tokens"),
        ({"train_type": "full"}, "has no adapter: leave out --add_tokens"),
        ({"add_tokens": "no_such_file.txt"}, "a file of tokens cannot be read"),
    ],
)
def test_new_tokens_are_refused_where_their_rows_cannot_train(options, message, models, tmp_path):
    argv = flags(
        **{
            "model_name": models(),
            "dataset": "dummy",
            "dry_run": True,
            "add_tokens": "<a>",
            **options,
        }
    )
    with pytest.raises(UserError, match=message):
        run(parse_train_config(argv))


def test_preferences_do_not_start_from_an_adapter_with_new_tokens(models, tmp_path):
    folder = models("llama", tie_word_embeddings=True)
    config = LoraConfig(
        target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 319]}
    )
    get_peft_model(load_base(folder, four_bit=False), config).save_pretrained(tmp_path / "adapter")
    options = {"model_name": folder, "dataset": "dummy", "dry_run": True, "objective": "dpo"}
    argv = flags(train_type="lora", adapter=tmp_path / "adapter", **options)
    with pytest.raises(UserError, match="has rows of new tokens"):
        run(parse_train_config(argv))
