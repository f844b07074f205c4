"""Prompts, masks, truncation and rejected rows."""

import json
import logging
import re
from typing import Any

import pytest
from tokenizers import models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.tokenization import check_vocabulary, describe_sample
from fsdp_qlora.data.content import Segment
from fsdp_qlora.data.text.formats import FORMATS, Format
from fsdp_qlora.model.architecture.tokenizer import load_tokenizer
from fsdp_qlora.utils.errors import UserError
from tests.data.rows import ROWS, make_tokenizer, render_alpaca, write_jsonl
from tests.helpers.tokenizers import spelled_tokenizer

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("no_input", [{}, {"input": None}, {"input": ""}, {"input": " \n"}])
def test_prompt_is_the_published_alpaca_template(no_input):
    segments = render_alpaca({"instruction": "Add {x}.", "input": "1, 2", "output": "3"})
    assert segments[0].text == (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd {x}.\n\n### Input:\n1, 2\n\n### Response:"
    )
    segments = render_alpaca({"instruction": "Go.", "output": "Ok", **no_input})
    assert segments[0].text == (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nGo.\n\n### Response:"
    )


@pytest.mark.parametrize("ends_with_eos", [False, True])
def test_response_and_end_of_sequence_are_learned_and_nothing_else(
    ends_with_eos, prepare, tmp_path
):
    tokenizer = make_tokenizer(ends_with_eos=ends_with_eos)
    tokenized, report = prepare(write_jsonl(tmp_path / "rows.jsonl", ROWS), tokenizer=tokenizer)
    for i, row in enumerate(ROWS):
        prompt, response = (segment.text for segment in render_alpaca(row))
        part = slice(*tokenized.offsets[i : i + 2])
        ids = tokenized.input_ids[part]
        learned = tokenized.learned[part]
        assert tokenizer.decode(ids[~learned]) == "<s>" + prompt
        assert tokenizer.decode(ids[learned]) == response + "</s>"
        assert ids.tolist().count(tokenizer.eos_token_id) == 1
        assert learned.tolist() == sorted(learned.tolist())  # masked first, then learned
        assert (tokenized.lengths[i], tokenized.num_targets[i]) == (len(ids), learned.sum())
    assert (report.num_tokens, report.num_targets) == (
        len(tokenized.input_ids),
        tokenized.learned.sum(),
    )


def test_a_format_with_three_segments_needs_one_table_row(
    prepare, tokenizer, tmp_path, monkeypatch
):
    def render(row: Any) -> list[Segment]:
        return [
            Segment(row["a1"], True),
            Segment(row["q2"], False),
            Segment(row["a2"], row["learn_last"]),
        ]

    monkeypatch.setitem(FORMATS, "turns", Format(("a1", "q2", "a2"), ("learn_last",), render))
    rows = [
        {"a1": "Blue.", "q2": " Twice?", "a2": " Blue, blue.", "learn_last": True},
        {"a1": "Add.", "q2": " Why?", "a2": " No.", "learn_last": False},
        {"a1": "", "q2": "Name a colour.", "a2": "", "learn_last": True},
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)

    def shown(tokenized: TokenizedRows, row: int) -> list[str]:
        return re.sub(
            r" \(\d+ tokens\) ---\n",
            "",
            describe_sample(tokenized, row, tokenizer),
        ).split("\n--- ")[1:]

    tokenized, report = prepare(path, max_bad_rows=0.5)
    assert (report.dataset_format, report.rejected) == ("turns", {"nothing to learn": [3]})
    assert shown(tokenized, 0) == ["learned<s>Blue.", "masked Twice?", "learned Blue, blue.</s>"]
    assert shown(tokenized, 1) == ["learned<s>Add.", "masked Why? No.</s>"]
    last, _ = prepare(path, max_bad_rows=0.5, learn="last")
    assert shown(last, 0) == ["masked<s>Blue. Twice?", "learned Blue, blue.</s>"]
    assert shown(prepare(path, max_bad_rows=0.5, learn="all")[0], 1) == [
        "learned<s>Add. Why? No.</s>"
    ]


def test_truncation_is_counted_and_rows_without_room_are_rejected(prepare, tokenizer, tmp_path):
    long_response = {**ROWS[1], "output": "Blue, " * 200}
    long_prompt = {**ROWS[0], "input": "2 and 3 " * 50}
    path = write_jsonl(tmp_path / "rows.jsonl", [long_prompt, long_response, ROWS[2]])
    full, full_report = prepare(path, context_length=4096)
    assert full_report.num_truncated == 0
    lengths = full.lengths.tolist()
    prompts = (full.lengths - full.num_targets).tolist()
    context_length = prompts[0]  # the first prompt alone fills it
    assert lengths[2] < context_length < lengths[1]
    tokenized, report = prepare(path, context_length=context_length, max_bad_rows=0.5)
    assert tokenized.row_numbers.tolist() == [2, 3]
    assert tokenized.lengths.tolist() == [context_length, lengths[2]]
    assert tokenized.num_targets.tolist() == [context_length - prompts[1], lengths[2] - prompts[2]]
    # not taught to stop at the cut
    assert tokenizer.eos_token_id not in tokenized.input_ids[:context_length]
    assert report.rejected == {"no room for a response within context_length": [1]}
    assert (report.num_truncated, report.num_tokens_cut) == (1, lengths[1] - context_length)
    assert prepare(path, context_length=context_length + 1)[0].num_targets[0] == 1
    with pytest.raises(
        UserError,
        match=r"1 of 1 rows cannot be used.*\n.*rows.jsonl:1: no room for a response",
    ):
        prepare(path, context_length=5, dataset_samples=1, max_bad_rows=1.0)


def test_unusable_rows_are_listed_and_too_many_are_refused(prepare, tmp_path, caplog):
    bad = [
        {"output": ""},
        {"output": " \n"},
        {"output": 7},
        {"instruction": None},
        {"input": ["x"]},
    ]
    rows = [{**ROWS[1], **change} for change in [*bad, {"output": "\ud800"}]]
    rows.append({"instruction": "No output at all."})
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows, *ROWS * 31])
    with path.open("a") as file:
        file.write("{broken}\n" + json.dumps(ROWS[0]) + "\n")
    rejected = {
        "empty output": [1, 2, 7],
        "output is not text but int": [3],
        "empty instruction": [4],
        "input is not text but list": [5],
        "output has half a surrogate pair": [6],
        "Expecting property name enclosed in double quotes (column 2); each line must be one JSON "
        "object": [101],
    }
    with caplog.at_level(logging.WARNING, "fsdp_qlora"):
        tokenized, report = prepare(path, max_bad_rows=0.08)
    assert report.rejected == rejected
    assert (len(tokenized), report.num_used, report.num_rows) == (94, 94, 102)
    assert f"{path}:1, 2, 7: empty output (3 rows)" in caplog.text
    # Now from the cache, whose file does not make the limit void.
    for options, limit in (
        ({"max_bad_rows": 0.07}, "7.0% are allowed"),
        ({"max_bad_rows": 0.0}, "0.0% are allowed"),
    ):
        with pytest.raises(
            UserError,
            match=rf"8 of 102 rows cannot be used, .*{limit}(.|\n)*rows.jsonl:1, 2, 7: "
            r"empty output .3 rows",
        ):
            prepare(path, **options)


def test_dummy_rows_fill_the_context_and_are_all_learned(prepare, tokenizer):
    tokenized, report = prepare("dummy", context_length=16, seed=3)
    assert set(tokenized.lengths) == {16}
    # the first token of a row has nothing to be predicted from
    assert set(tokenized.num_targets) == {15}
    assert (len(tokenized), report.num_targets) == (512, 512 * 15)
    check_vocabulary(tokenized, len(tokenizer))
    assert (prepare("dummy", context_length=16, seed=3)[0].input_ids == tokenized.input_ids).all()
    assert len(prepare("dummy", context_length=16, dataset_samples=9)[0]) == 9


def test_token_outside_the_vocabulary_is_reported_with_its_row(prepare, tmp_path):
    tokenized, _ = prepare(write_jsonl(tmp_path / "rows.jsonl", [{}, *ROWS]), max_bad_rows=0.5)
    largest = int(tokenized.input_ids.max())
    number = 2 + next(
        i for i in range(3) if largest in tokenized.input_ids[slice(*tokenized.offsets[i : i + 2])]
    )
    check_vocabulary(tokenized, largest + 1)
    with pytest.raises(
        UserError, match=f"Row {number} has the token id {largest}, .* {largest} embeddings"
    ):
        check_vocabulary(tokenized, largest)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "GPTNeoXTokenizer", "PreTrainedTokenizerFast"])
def test_a_tokenizer_is_that_of_its_file_whatever_its_class_rebuilds(kind, tmp_path, lines):
    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    backend = spelled_tokenizer("byte_level").backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    vocab = backend.get_vocab() | {"12": 400}
    backend.model = models.BPE(vocab, [("1", "2")])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**settings, "tokenizer_class": kind})
    )
    found = load_tokenizer(tmp_path, "x")
    assert found.tokenize("12 12") == ["1", "2", "Ġ", "1", "2"]
    assert [line for line in lines if "differently from tokenizer.json" in line] == [
        f"{kind} splits some texts differently from tokenizer.json; tokenizer.json is used."
    ] * (kind != "PreTrainedTokenizerFast")
    found.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").tokenize("12") == ["1", "2"]
