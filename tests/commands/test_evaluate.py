"""`evaluate` measures what transformers and PEFT compute in one process."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer

from fsdp_qlora.__main__ import main
from fsdp_qlora.commands.inference import describe
from fsdp_qlora.utils.records import read_records
from tests.helpers.models import Models
from tests.helpers.reference import batch_loss, encode, load_base, load_decoded_base, peft_model
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks, train_ok

LENGTH = 6
SETS = {"first": make_rows(7), "second": make_rows(4, seed=5)}


def measured(ranks: int, logs: Path, *words: str, **options: object) -> dict[str, Any]:
    """The JSON that the command prints on so many ranks."""
    argv = [
        "evaluate",
        *words,
        "--json",
        *flags(quant_cache="off", batch_size=3, precision="fp32", **options),
    ]
    statuses, output = on_ranks(ranks, main, (argv,), logs)
    assert statuses == [0] * ranks, output[-6000:]
    printed = (logs / "rank0.log").read_text()
    found: dict[str, Any] = json.JSONDecoder().raw_decode(printed, printed.index("{\n"))[0]
    return found


@pytest.fixture(scope="module")
def adapter(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of PEFT that changes its base's answers."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    peft_model(load_base(models(), four_bit=False), r=4, init_lora_weights=False).save_pretrained(
        folder
    )
    return folder


@pytest.mark.parametrize("kind", ["base", "adapter", "merged"])
def test_losses_are_those_of_transformers_and_peft_on_any_ranks(kind, models, adapter, tmp_path):
    options: dict[str, object] = {"model_name": models(), "train_type": "lora"}
    model = load_base(models(), four_bit=False)
    if kind == "adapter":
        options = {"adapter": adapter, "train_type": "qlora"}
        model = PeftModel.from_pretrained(load_decoded_base(models()), adapter)
    elif kind == "merged":
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        model.save_pretrained(tmp_path / "merged")
        AutoTokenizer.from_pretrained(models()).save_pretrained(tmp_path / "merged")
        options = {"adapter": tmp_path / "merged"}
    files = {name: write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in SETS.items()}
    for ranks in (1,) if kind == "merged" else (1, 2):
        words = ["--dataset", str(files["first"]), f"other={files['second']}"]
        found = measured(ranks, tmp_path / str(ranks), *words, **options)
        for (name, result), rows in zip(found.items(), SETS.values(), strict=True):
            batch = encode(models(), rows)
            expected = batch_loss(model, batch).item()
            assert result["loss"] == pytest.approx(expected, abs=1e-5), (name, ranks)
            assert result["perplexity"] == pytest.approx(math.exp(result["loss"]), rel=1e-12)
            targets = sum(int((labels[:, 1:] != -100).sum()) for _, labels in batch)
            assert (result["rows"], result["num_target_tokens"]) == (len(rows), targets)
        assert (
            list(found) == ["first", "other"] and found["first"]["loss"] != found["other"]["loss"]
        )


def test_a_model_made_for_chats_is_asked_in_its_template(models, tmp_path):
    base = Path(shutil.copytree(models(), tmp_path / "base"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "{% for turn in messages %}{{ turn.content }}{{ eos_token }}{% endfor %}"
    )
    tokenizer.save_pretrained(base)
    words = ["--dataset", str(write_rows(tmp_path / "rows.jsonl", make_rows(3)))]
    by_default, chat, alpaca = (
        measured(1, tmp_path / name, *words, model_name=base, train_type="lora", **given)
        for name, given in {
            "default": {},
            "chat": {"prompt_template": "chat"},
            "a": {"prompt_template": "alpaca"},
        }.items()
    )
    assert by_default == chat != alpaca


def test_rows_that_are_not_there_are_refused_before_weights_are_read(models, tmp_path, capsys):
    (base := tmp_path / "base").mkdir()
    # a model without weights
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((models() / name).read_bytes())
    argv = ["evaluate", *flags(model_name=base, dataset=tmp_path / "none.jsonl", nproc_per_node=1)]
    assert main(argv) == 2 and "none.jsonl" in capsys.readouterr().err
    assert (
        main([*argv, "--objective", "dpo"]) == 2
        and ("compares with the start of a run") in capsys.readouterr().err
    )


def test_evaluate_prints_whole_counts_and_empty_cells():
    results = {"chat": {"loss": 1.2345678, "rows": 40}, "choice": {"acc": 0.5}}
    assert [line.split() for line in describe(results).splitlines()] == [
        ["loss", "rows", "acc"],
        ["chat", "1.23457", "40"],
        ["choice", "0.50000"],
    ]


def test_tasks_of_lm_eval_score_as_one_process_of_transformers_does(models, adapter, tmp_path):
    pytest.importorskip("lm_eval")
    model = PeftModel.from_pretrained(load_base(models(), four_bit=False), adapter).eval()
    tokenizer = AutoTokenizer.from_pretrained(models())
    words = [row["output"] for row in make_rows(24, seed=3)]
    docs: list[dict[str, Any]] = []
    for number, (first, *choices) in enumerate(
        zip(words[:11], words[5:16], words[12:23], strict=True)
    ):
        question = f"{first} is"
        # one that no model gives
        answer = generated(model, tokenizer, question) + "!" * (number == 4)
        choices = [f" {word}" for word in choices]
        docs.append(
            {"question": question, "choices": choices, "label": number % 2, "answer": answer}
        )
    rows = write_rows(tmp_path / "docs.jsonl", docs)
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
    }
    common |= {"doc_to_text": "question"}
    choice = {
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
    }
    text = {
        "task": "text",
        "output_type": "generate_until",
        "generation_kwargs": {"max_gen_toks": LENGTH, "until": []},
    }
    text |= {"doc_to_target": "answer"}
    whole = {
        "task": "whole",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "question",
    }
    # YAML is JSON too
    for task, metric in ((choice, "acc"), (text, "exact_match"), (whole, "byte_perplexity")):
        content = common | task | {"metric_list": [{"metric": metric}]}
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(content))
    right = sum(best_choice(model, tokenizer, doc) == doc["label"] for doc in docs)
    assert 0 < right < len(docs)
    questions = [doc["question"] for doc in docs]
    logps = [logp(model, [0, *tokenizer(question)["input_ids"]], 1) for question in questions]
    tasks = ",".join(f"{tmp_path}/{name}.yaml" for name in ("choice", "text", "whole"))
    results = [
        measured(ranks, tmp_path / str(ranks), adapter=adapter, tasks=tasks) for ranks in (1, 2)
    ]
    # A run that goes on with the adapter measures it before the first step, and learns what it
    # learns without tasks.
    common = {
        "model_name": models(),
        "adapter": adapter,
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(12)),
    }
    common |= {
        "train_type": "lora",
        "precision": "fp32",
        "lr": 3e-3,
        "eval_fraction": 0.25,
        "max_steps": 2,
    }
    output = train_ok(2, tmp_path / "with", eval_tasks=tasks, **common)
    train_ok(2, tmp_path / "without", **common)
    for name in ("adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "with" / name).read_bytes() == (
            tmp_path / "without" / name
        ).read_bytes(), name
    before, after = (
        row["eval_tasks"]
        for row in read_records(tmp_path / "with/metrics.jsonl")
        if "eval_tasks" in row
    )
    assert before["whole"] != after["whole"] and "  whole/byte_perplexity " in output
    for found in (*results, before):
        assert found["choice"]["acc"] == pytest.approx(right / len(docs))
        assert found["text"]["exact_match"] == pytest.approx(10 / 11)
        perplexity = math.exp(-sum(logps) / len("".join(questions)))
        assert found["whole"]["byte_perplexity"] == pytest.approx(perplexity, rel=1e-5)


@torch.no_grad()
def logp(model: torch.nn.Module, ids: list[int], start: int) -> float:
    """The log-probability of the tokens from `start` on."""
    logps = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)
    return float(logps.gather(1, torch.tensor(ids)[1:, None])[start - 1 :].sum())


def best_choice(model: torch.nn.Module, tokenizer: Any, doc: dict[str, Any]) -> int:
    """The choice with the highest log-probability after the question."""
    start = len(tokenizer(doc["question"])["input_ids"])
    scores = [
        logp(model, tokenizer(doc["question"] + choice)["input_ids"], start)
        for choice in doc["choices"]
    ]
    return scores.index(max(scores))


def generated(model: torch.nn.Module, tokenizer: Any, text: str) -> str:
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    made = model.generate(input_ids=ids, max_new_tokens=LENGTH, do_sample=False, pad_token_id=1)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def test_unknown_tasks_and_a_missing_package_are_refused_at_once(
    models, tmp_path, capsys, monkeypatch
):
    assert main(["evaluate", *flags(model_name=models())]) == 2
    assert "--tasks NAMES" in capsys.readouterr().err
    assert main(["evaluate", *flags(model_name=models(), dataset="alpaca_demo", tasks=",")]) == 2
    assert "--tasks: expected one name or more" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["evaluate", *flags(model_name=models(), tasks="arc_easy")]) == 2
    assert 'pip install "fsdp_qlora[lm-eval]"' in capsys.readouterr().err
    assert main(["train", *flags(eval_tasks="arc_easy", eval_fraction=0.1)]) == 2
    assert (
        '--eval_tasks needs the package lm_eval: pip install "fsdp_qlora[lm-eval]"'
    ) in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("lm_eval")
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "none.jsonl")}},
    }
    (tmp_path / "broken.yaml").write_text(
        json.dumps({"task": "broken", "test_split": "test"} | source)
    )
    own = {"model_name": tmp_path / "none", "tasks": tmp_path / "broken.yaml", "nproc_per_node": 1}
    assert (
        main(["evaluate", *flags(**own)]) == 2
        and ("lm-eval cannot load") in capsys.readouterr().err
    )
    own = {
        "model_name": models(),
        "eval_tasks": tmp_path / "broken.yaml",
        "eval_fraction": 0.1,
        "dry_run": True,
    }
    assert main(["train", *flags(**own)]) == 2 and "lm-eval cannot load" in capsys.readouterr().err
