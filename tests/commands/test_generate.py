"""A trained model answers as transformers and PEFT let it answer."""

import datetime
import io
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from fsdp_qlora.__main__ import main
from fsdp_qlora.commands.run_config import adapter_folder, trained_model_options
from fsdp_qlora.config.text import identity_settings, resolved_options
from fsdp_qlora.data.content import Fields, prompt_text
from fsdp_qlora.sharding import vocabulary
from fsdp_qlora.training.generation.prompt_format import read_questions
from fsdp_qlora.training.generation.samples import SamplePrompts, Samples
from fsdp_qlora.training.generation.sampling import Draws, SamplingOptions, exponential_like
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.records import read_records
from tests.helpers.models import Models
from tests.helpers.reference import PROMPT, PROMPT_WITH_INPUT, load_decoded_base
from tests.helpers.rows import make_rows, read_rows, write_rows
from tests.helpers.run import flags, on_ranks, train_ok

LENGTH = 12


def _generate(argv: list[str], stdin: str) -> int:
    import sys

    sys.stdin = io.StringIO(stdin)
    noted = [
        mock.patch.object(module, name, wraps=getattr(module, name))
        for module, name in (
            (vocabulary, "gather_rows"),
            (dist, "init_process_group"),
            (dist, "new_group"),
        )
    ]
    gather, start, new_group = (each.start() for each in noted)
    status = main(["generate", *argv])
    assert not any(call.args[0].dim() > 1 for call in gather.call_args_list), "a head is gathered"
    assert start.call_args.kwargs["timeout"] <= datetime.timedelta(hours=1), (
        "a hang is noticed by nobody"
    )
    waits = [call.kwargs.get("timeout") for call in new_group.call_args_list]
    assert (datetime.timedelta(days=7) in waits) == bool(stdin), "only a chat waits for its user"
    return status


def _train_with_short_samples(argv: list[str]) -> int:
    import train
    from fsdp_qlora.run import extra_measurements

    extra_measurements.SAMPLE_TOKENS = LENGTH  # type: ignore[attr-defined]  # 128 take half a minute
    return train.main(argv)


def generate(ranks: int, folder: Path, stdin: str = "", **options: object) -> str:
    """The output of the command on this many ranks."""
    argv = flags(**{"quant_cache": "off", "max_new_tokens": LENGTH, **options})
    statuses, output = on_ranks(ranks, _generate, (argv, stdin), folder)
    assert statuses == [0] * ranks, output[-6000:]
    return output


@pytest.fixture(scope="module")
def base(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of these tests' own."""
    return shutil.copytree(models(), tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A QLoRA run whose adapter changes the answers."""
    folder = tmp_path_factory.mktemp("generate")
    rows = write_rows(folder / "rows.jsonl", make_rows(8))
    options = {"precision": "fp32", "lr": 3e-3, "num_epochs": 2, "batch_size": 4}
    train_ok(2, folder / "run", model_name=base, dataset=rows, **options)
    return folder / "run"


def expected(run: Path, base: Path, prompts: list[str]) -> list[list[int]]:
    """The tokens that transformers generates, one prompt after the other, from the decoded base and
    PEFT's adapter.
    """
    model = PeftModel.from_pretrained(load_decoded_base(base), run).eval()
    return [greedy(model, AutoTokenizer.from_pretrained(run), prompt) for prompt in prompts]


def greedy(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, text: str, **options: bool
) -> list[int]:
    ids = tokenizer(text, return_tensors="pt", **options)["input_ids"]
    made = model.generate(input_ids=ids, max_new_tokens=LENGTH, do_sample=False, pad_token_id=1)
    return list(made[0, ids.shape[1] :].tolist())


def end_at_different_places(base: Path, answers: list[list[int]]) -> list[int]:
    """Give the model the end token with which these answers get the most different lengths. Returns
    its end tokens.
    """

    def num_lengths(token: int) -> int:
        return len({answer.index(token) if token in answer else LENGTH for answer in answers})

    end = max(sorted({token for answer in answers for token in answer}), key=num_lengths)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    return [1, end]


def test_greedy_answers_on_two_ranks_equal_those_of_transformers(run, base, tmp_path):
    rows = make_rows(5, seed=9)
    for row in rows:
        row.pop("output")
    asked = write_rows(tmp_path / "prompts.jsonl", rows)
    prompts = [(PROMPT_WITH_INPUT if row["input"] else PROMPT).format(**row) for row in rows]
    ends = end_at_different_places(base, expected(run, base, prompts))
    tokens = expected(run, base, prompts)
    tokenizer = AutoTokenizer.from_pretrained(run)
    # one rank, or row of a batch, goes on when others have ended
    assert len({len(answer) for answer in tokens}) > 1
    # The token that ends an answer is no text, also where it is not a special one.
    shown = [answer[: -1 if answer[-1] in ends else None] for answer in tokens]
    answers = tokenizer.batch_decode(shown)
    for name, ranks, options in (
        ("two", 2, {"batch_size": 2}),
        ("offloaded", 2, {"use_cpu_offload": True, "batch_size": 1}),
        ("one", 1, {"batch_size": 5}),
    ):
        out = tmp_path / f"{name}.jsonl"
        generate(ranks, tmp_path / name, adapter=run, prompts=asked, out=out, **options)
        found = read_rows(out)
        assert [row["completion"] for row in found] == answers, name
        assert [row["num_tokens"] for row in found] == [len(answer) for answer in tokens], name
        assert [{name: row[name] for name in rows[0]} for row in found] == rows
    merged = tmp_path / "merged"
    assert main(["merge", *flags(adapter=run, out=merged, base="dequantized", dtype="fp32")]) == 0
    out = tmp_path / "merged.jsonl"
    generate(1, tmp_path / "whole", adapter=merged, prompts=asked, out=out, precision="fp32")
    found = read_rows(out)
    assert [row["completion"] for row in found] == answers  # in the prompt format of the training
    output = generate(2, tmp_path / "chat", stdin=rows[1]["instruction"] + "\n", adapter=run)
    assert answers[1] in output or rows[1]["input"]


def test_an_adapter_answers_alike_from_run_export_upload_and_hub(run, base, tmp_path, monkeypatch):
    exported = tmp_path / "exported"
    uploaded = tmp_path / "uploaded"
    assert main(["export", str(run), "--out", str(exported), "--model_name", str(base)]) == 0
    uploaded.mkdir()
    for name in json.loads((run / "result.json").read_text())["files"]:  # as --push_to_hub does
        shutil.copy(run / name, uploaded / name)
    monkeypatch.setattr(hub, "ask_hub", lambda name, kind: None)
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: str(uploaded))
    own = ["--model_name", str(base)]
    roads = [
        trained_model_options(adapter_folder(str(road)), own)
        for road in (run, exported, uploaded, "owner/name")
    ]
    settings = [identity_settings(resolved_options(config))[0] for config in roads]
    assert settings == [settings[0]] * 4 and settings[0]["precision"] == "fp32"
    options = {"prompt": "sort the", "model_name": base}
    answers = [
        generate(1, tmp_path / road.name, adapter=road, **options).splitlines()[-1]
        for road in (run, exported)
    ]
    assert answers[0] == answers[1] != ""


def test_a_chat_keeps_its_history_and_the_plain_base_completes(models, tmp_path):
    base = models()
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    answer = tokenizer.decode(greedy(model, tokenizer, "sort the"), skip_special_tokens=True)
    common = {"model_name": base, "train_type": "lora", "precision": "fp32"}
    said = generate(1, tmp_path / "base", prompt="sort the", **common)
    assert said.endswith(f"{base} (lora, 1 process)\n{answer}\n") and "Self-test" not in said
    chat = generate(
        2, tmp_path / "chat", stdin="red\nblue\n", prompt_template="user_assistant", **common
    )
    text = "<s>User: red\nAssistant:"
    answers = []
    for following in ("</s>\nUser: blue\nAssistant:", ""):
        tokens = greedy(model, tokenizer, text, add_special_tokens=False)
        answers.append(tokenizer.decode(tokens, skip_special_tokens=True))
        text += f" {answers[-1]}{following}"
    assert "\n".join([*answers, ""]) in chat


def test_a_prompt_with_input_is_an_instruction_with_it(tmp_path):
    [asked] = read_questions(
        write_rows(tmp_path / "rows.jsonl", [{"prompt": "sort", "input": "b a"}])
    )
    assert asked.content == Fields("sort", "", context="b a")


def test_draws_follow_temperature_top_p_and_seed():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -5.0])

    def drawn(**options: float) -> list[int]:
        draws = Draws(SamplingOptions(seed=3, **options), [0])
        return [int(draws(logits[None])) for _ in range(3000)]

    shares = torch.bincount(torch.tensor(drawn(temperature=2.0)), minlength=5) / 3000
    torch.testing.assert_close(shares, (logits / 2).softmax(0), atol=0.03, rtol=0)
    # 0.64, 0.24, 0.09, ...: two are needed for 0.7
    assert set(drawn(temperature=1.0, top_p=0.7)) == {0, 1} and set(
        drawn(temperature=1.0, top_p=0.1)
    ) == {0}
    assert drawn(temperature=1.0) == drawn(temperature=1.0)
    state = torch.get_rng_state()
    drawn(temperature=1.0)
    assert torch.equal(state, torch.get_rng_state())


def test_some_tokens_are_never_drawn_and_unknown_ones_are_passed_over():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    draws = Draws(SamplingOptions(temperature=2.0, never=(0, 2, 4, 151655)), [0])
    assert {int(draws(logits)) for _ in range(100)} == {1, 3}
    assert logits[0, 0] == 3
    greedy = Draws(SamplingOptions(never=(0,)), [0])
    assert int(greedy(logits)) == 1


def test_noise_on_a_cpu_is_what_torch_draws():
    sources = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    noise = exponential_like(torch.zeros(2, 5000), sources)
    for row, seed in zip(noise, (3, 4), strict=True):
        generator = torch.Generator().manual_seed(seed)
        assert torch.equal(row, torch.empty(5000).exponential_(generator=generator))


def test_unicode_separators_end_no_line_of_prompts_and_samples(tmp_path):
    text = "a\u2028b\x85c"
    path = tmp_path / "prompts.jsonl"
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    path.write_text(f"\ufeff{line}\n", encoding="utf-8")
    [asked] = read_questions(path)
    assert asked.row["prompt"] == prompt_text(asked.content) == text
    samples = Samples(SamplePrompts(), None, tmp_path)  # type: ignore[arg-type]
    for step in (2, 4):
        samples._keep(step, [{"step": step, "prompt": text, "text": text}])
    kept = [(row["step"], row["text"]) for row in read_records(tmp_path / "samples.jsonl")]
    assert kept == [(2, text), (4, text)]


def test_samples_are_the_models_answers_and_change_nothing(models, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(12))
    held_out = write_rows(tmp_path / "eval.jsonl", make_rows(4))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("sort the list\nname a river\nblue water\n")
    common = {"model_name": models(), "dataset": rows, "eval_dataset": held_out, "eval_steps": 2}
    common |= {"precision": "fp32", "lr": 3e-3, "lora_dropout": 0.1, "max_steps": 4}
    common["batch_size"] = 1
    own = {"sample_prompts": prompts, "quant_cache": "off", "context_length": 512}
    argv = flags(output_dir=tmp_path / "with", **own, **common)
    statuses, output = on_ranks(2, _train_with_short_samples, (argv,), tmp_path / "logs")
    assert statuses == [0, 0], output[-6000:]
    train_ok(2, tmp_path / "without", **common)
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("with", "without")]
    assert files[0].read_bytes() == files[1].read_bytes()
    samples = read_rows(tmp_path / "with" / "samples.jsonl")
    asked = [(step, text) for step in (0, 2, 4) for text in prompts.read_text().splitlines()]
    assert [(row["step"], row["prompt"]) for row in samples] == asked
    out = tmp_path / "out.jsonl"
    generate(1, tmp_path / "one", adapter=tmp_path / "with", prompts=prompts, out=out)
    answers = [row["completion"] for row in read_rows(out)]
    assert [row["text"] for row in samples[-3:]] == answers
    assert len({row["text"] for row in samples}) > 3
