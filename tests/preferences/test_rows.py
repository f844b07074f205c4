"""Rows of two answers: what they may look like, what is learned of them, and which are refused."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_qlora.config.conflicts import check
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.micro_batch import concatenate_rows, pad_rows
from fsdp_qlora.data.batches.report import DataReport
from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.data.batches.rows import NO_ROWS, Column, Lengths, TokenizedRows, Unit, join_rows
from fsdp_qlora.data.batches.tokenization import describe_sample
from fsdp_qlora.data.columns import COLUMNS
from fsdp_qlora.data.run_data import RunData, read_dataset
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.recognition import RequestedFormat
from fsdp_qlora.data.text.rendering import prompt_record
from fsdp_qlora.data.text.templates import ChosenTemplate
from fsdp_qlora.model.architecture.attention import FLASH, VARLEN, can_share
from fsdp_qlora.planning.reading import pick_data
from fsdp_qlora.planning.run_rows import RunRows, make_schedule
from fsdp_qlora.utils.errors import UserError
from tests.helpers.tokenizers import spelled_tokenizer

CHAT = (
    "{% for m in messages %}{{ '[' + m.role[0] + ']' + m.content }}{% if m.role == 'assistant' "
    "%}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
ASKED, GO, NO = (
    {"role": role, "content": text}
    for role, text in (("user", "hi"), ("assistant", "go"), ("assistant", "no"))
)
SYSTEM = {"role": "system", "content": "s"}
SHARED = [{"from": "human", "value": "hi"}]
GPT_GO = {"from": "gpt", "value": "go"}
GPT_NO = {"from": "gpt", "value": "no"}
WORDS = (" go", " no", " so")
TEXTS = ("<s>hi| go</s>", "<s>hi| no</s>")
CHATS = ("[u]hi[a]|go</s>", "[u]hi[a]|no</s>")
ASKED_IN_TEXT = ("[u]hi[a]| go</s>", "[u]hi[a]| no</s>")
MESSAGES_REJECTED = {"messages": [ASKED, GO], "rejected_response": "no"}
# Row -> both answers, learned from the bar on; of a model that is made for chats.
ROWS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"prompt": "hi", "chosen": " go", "rejected": " no"}, TEXTS),
    ({"chosen": "hi go", "rejected": "hi no"}, TEXTS),
    ({"question": "hi", "response_j": " go", "response_k": " no"}, ASKED_IN_TEXT),
    ({"question": "hi", "chosen": " go", "rejected": " no"}, ASKED_IN_TEXT),
    (
        {"instruction": "h", "input": "i", "chosen_response": " go", "rejected_response": " no"},
        ("[u]h\n\ni[a]| go</s>", "[u]h\n\ni[a]| no</s>"),
    ),
    (
        {"system": "s", "question": "hi", "chosen": "go", "rejected": "no"},
        ("[s]s" + CHATS[0], "[s]s" + CHATS[1]),
    ),
    ({"prompt": [ASKED], "chosen": [GO], "rejected": [NO]}, CHATS),
    ({"prompt": [ASKED], "chosen": GO, "rejected": NO}, CHATS),
    ({"prompt": "hi", "chosen": [GO], "rejected": [NO]}, CHATS),
    ({"chosen": [ASKED, GO], "rejected": [ASKED, NO]}, CHATS),
    ({"prompt": "hi", "chosen": [ASKED, GO], "rejected": [ASKED, NO]}, CHATS),
    ({"chosen_messages": [ASKED, GO], "rejected_messages": [ASKED, NO]}, CHATS),
    ({"conversations": SHARED, "chosen": GPT_GO, "rejected": GPT_NO}, CHATS),
    ({"messages": [ASKED], "chosen": GO, "rejected": NO}, CHATS),
    ({"messages": [ASKED, GO], "chosen": "go", "rejected": "no"}, CHATS),
    ({"conversations": json.dumps(SHARED), "chosen": "go", "rejected": "no"}, CHATS),
    (MESSAGES_REJECTED | {"rejected_images": None}, CHATS),
    ({"messages": [ASKED], "chosen_response": "go", "rejected_response": "no"}, CHATS),
    ({"text": json.dumps({"question": "hi", "chosen": "go", "rejected": "no"})}, CHATS),
    ({"chosen": "hi: go on", "rejected": "hi: go in"}, ("<s>hi: go| on</s>", "<s>hi: go| in</s>")),
    ({"chosen": "hi: go", "rejected": "hi: go, so"}, ("<s>hi: go|</s>", "<s>hi: go|, so</s>")),
    ({"chosen": "hi: gone", "rejected": "hi: go"}, ("<s>hi:| gone</s>", "<s>hi:| go</s>")),
    (
        {"chosen": "hi e\u0301", "rejected": "hi e\u0300"},
        ("<s>hi| e\u0301</s>", "<s>hi| e\u0300</s>"),
    ),
    ({"chosen": "hi isn't", "rejected": "hi isn's"}, ("<s>hi| isn't</s>", "<s>hi| isn's</s>")),
    (
        {"chosen": "hi e\u0301a", "rejected": "hi e\u0301b"},
        ("<s>hi| e\u0301a</s>", "<s>hi| e\u0301b</s>"),
    ),
    (
        {"chosen": "天気は良い", "rejected": "天気は悪い"},
        ("<s>天気は|良い</s>", "<s>天気は|悪い</s>"),
    ),
    (
        {"prompt": [SYSTEM, ASKED], "chosen": [GO], "rejected": [NO]},
        ("[s]s[u]hi[a]|go</s>", "[s]s[u]hi[a]|no</s>"),
    ),
    (
        {"chosen": [ASKED, GO, ASKED, NO], "rejected": [ASKED, GO, ASKED, GO]},
        ("[u]hi[a]go</s>[u]hi[a]|no</s>", "[u]hi[a]go</s>[u]hi[a]|go</s>"),
    ),
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "hi", "chosen": "go", "rejected": "go"}, "chosen and rejected are the same"),
    ({"prompt": "hi", "chosen": "go", "rejected": ""}, "empty rejected"),
    ({"prompt": "hi", "chosen": None, "rejected": "no"}, "empty chosen"),
    ({"prompt": None, "chosen": "go", "rejected": "no"}, "different prompts"),
    ({"chosen": "go", "rejected": "gone"}, "different prompts"),
    ({"chosen": "hi go", "rejected": "hi go "}, "chosen and rejected are the same"),
    (
        {"chosen": [ASKED, {**GO, "reasoning": "\ud83d"}], "rejected": [ASKED, NO]},
        "turn 2 has half a surrogate pair",
    ),
    ({"chosen": [SYSTEM, GO], "rejected": [ASKED, NO]}, "different prompts"),
    ({"chosen": [ASKED, GO], "rejected": [ASKED]}, "empty rejected"),
    ({"chosen": [ASKED, GO], "rejected": [ASKED, GO]}, "same"),
    ({"chosen": [ASKED, GO], "rejected": 7}, "rejected is not a list of turns"),
    (MESSAGES_REJECTED | {"rejected_images": ["a.png"]}, "rejected_images is filled"),
    (MESSAGES_REJECTED | {"messages": [ASKED]}, "messages end without an answer"),
    (MESSAGES_REJECTED | {"rejected_response": "go"}, "chosen and rejected are the same"),
    (MESSAGES_REJECTED | {"rejected_response": None}, "rejected is not"),
    ({"text": '{"question": "hi", "chosen": "go"}'}, "text is no JSON of question, chosen, reje"),
]


def prepared(
    rows: list[dict[str, Any]], folder: Path, **options: Any
) -> tuple[TokenizedRows, DataReport]:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = spelled_tokenizer("byte_level")
    tokenizer.chat_template = CHAT
    config = TrainConfig(
        dataset=(str(file),), **{"objective": "dpo", "context_length": 512, **options}
    )
    return read_dataset(str(file), tokenizer, pick_data(config), vocab_size=len(tokenizer))[:2]


@pytest.mark.quick
@pytest.mark.parametrize(("row", "expected"), ROWS)
def test_both_answers_are_learned_after_their_common_prompt(row, expected, tmp_path):
    (rows, _) = prepared([row], tmp_path, prompt_template="chat")
    tokenizer = spelled_tokenizer("byte_level")
    assert len(rows) == 1
    for document, text in enumerate(expected):
        span = slice(*rows.document_offsets[document : document + 2])
        ids = rows.input_ids[span]
        learned = rows.learned[span]
        assert f"{tokenizer.decode(ids[~learned])}|{tokenizer.decode(ids[learned])}" == text
    assert rows.num_targets.tolist() == [rows.learned.sum()] == [rows.document_targets.sum()]


@pytest.mark.quick
@pytest.mark.parametrize(("row", "reason"), BAD)
def test_uninformative_pairs_are_refused_with_the_reason(row, reason, tmp_path):
    good = next(pair for pair, _ in ROWS if pair.keys() >= row.keys())
    said = rf"(?s)1 of 2 rows cannot be used.*pairs.jsonl:2: .*{reason}"
    with pytest.raises(UserError, match=said):
        prepared([good, row], tmp_path)
    assert len(prepared([good, row], tmp_path, max_bad_rows=0.5)[0]) == 1


ANSWERS = {"chosen": " go", "rejected": " no"}
TOOL = [{"name": "f"}]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "hi", "input": "x", **ANSWERS}, "input"),
        ({"prompt": "hi", "context": "x", **ANSWERS}, "input"),
        ({"messages": [ASKED], "input": "x", **ANSWERS}, "input"),
        ({"instruction": "hi", "input": "x", "chosen": [GO], "rejected": [NO]}, "input"),
        ({"instruction": "hi", "tools": TOOL, **ANSWERS}, "tools"),
        ({"prompt": "hi", "history": [["a", "b"]], **ANSWERS}, "history"),
        ({"prompt": "hi", "context": "x", "completion": "go", "label": True}, "input"),
        ({"messages": [ASKED, GO], "input": "x", "label": True}, "input"),
        ({"query": "hi", "functions": TOOL, "completion": "go", "label": True}, "tools"),
    ],
)
def test_columns_beside_a_prompt_are_used_or_refused(row, column, tmp_path):
    said = rf"{column} .*is filled.* --columns ignore={column} trains without it"
    with pytest.raises(UserError, match=said):
        prepared([row], tmp_path, objective="kto" if "label" in row else "dpo")


@pytest.mark.quick
def test_tools_make_text_a_chat(tmp_path):
    (tmp_path / "a.jinja").write_text(
        "{{ tools[0].name if tools }}" + CHAT.replace("[a]", "[a]<think>")
    )
    thought = {"chosen": [{**GO, "content": "<think>so</think>go"}], "rejected": [NO]}
    tools = {"prompt": "hi", "tools": TOOL, **ANSWERS}
    rows, _ = prepared(
        [{"prompt": "hi", **thought}, tools], tmp_path, prompt_template=str(tmp_path / "a.jinja")
    )
    text = spelled_tokenizer("byte_level").decode(rows.input_ids)
    assert "f[u]hi[a] go" in text.replace("</s>", "")


@pytest.mark.quick
def test_answers_that_are_the_same_within_the_context_are_left_out(tmp_path):
    rows = [
        {"prompt": "hi", "chosen": " so so go", "rejected": " so so no"},
        {"prompt": "hi", "chosen": " go", "rejected": " no"},
    ]
    kept, _ = prepared(rows, tmp_path, context_length=5, max_bad_rows=0.5)
    assert kept.row_numbers.tolist() == [2]


@pytest.mark.quick
def test_rows_and_objective_must_fit_each_other_also_from_the_cache(tmp_path):
    for _ in range(2):
        prepared([ROWS[0][0]], tmp_path)
        said = r"preferences .*--objective dpo.*--columns completion=chosen"
        with pytest.raises(UserError, match=said):
            prepared([ROWS[0][0]], tmp_path, objective="sft")
        single = [{"prompt": "hi", "completion": " go"}]
        prepared(single, tmp_path, objective="sft")
        with pytest.raises(UserError, match="--objective dpo needs preferences"):
            prepared(single, tmp_path)


@pytest.mark.quick
def test_the_answers_of_a_pair_are_documents_of_one_micro_batch(tmp_path):
    longer = {"prompt": "hi", "chosen": " go go go", "rejected": "no"}
    rows, _ = prepared([ROWS[0][0], longer], tmp_path)
    chosen = np.array([1, 0])
    joined = concatenate_rows(rows, chosen, pad_token_id=1)
    padded = pad_rows(rows, chosen, pad_token_id=1)
    assert joined.documents["document_lengths"] == [9, 4, 5, 5]
    assert joined.num_targets == padded.num_targets == [7, 2, 3, 3]
    assert padded.input_ids.shape == (4, 9)
    assert np.bincount(padded.target_rows // 9).tolist() == joined.num_targets
    picked = join_rows([rows[1], rows[0]])
    assert picked.splits.tolist() == [9, 5] and picked.document_targets.tolist() == [7, 2, 3, 3]


def filled(num_rows: int, first: int) -> TokenizedRows:
    """Rows of two documents whose every array has numbers of its own."""
    sizes: dict[Unit, int] = {"token": 4 * num_rows, "row": num_rows, "document": 2 * num_rows}
    columns = {
        f"of_{per}": Column(per, first + number + np.arange(size))
        for number, (per, size) in enumerate(sizes.items())
    }
    return TokenizedRows(
        first + np.arange(4 * num_rows),
        first + 1 + np.arange(4 * num_rows),
        np.arange(0, 4 * num_rows + 1, 4),
        first + np.arange(num_rows),
        np.full(num_rows, 2),
        "first_document",
        columns,
        RowImages(
            first + np.arange(16 * num_rows).reshape(-1, 16), np.ones((num_rows, 2), np.int64)
        ),
    )


@pytest.mark.quick
def test_slices_and_joined_tables_keep_every_array():
    whole = filled(3, 100)
    others = filled(2, 200)
    again = join_rows([whole[row] for row in range(3)])
    assert again.arrays.keys() == whole.arrays.keys()
    for name, array in whole.arrays.items():
        assert again.arrays[name].tolist() == array.tolist(), name
    joined = join_rows([whole, others])
    assert joined.arrays.keys() == whole.arrays.keys()
    for name, array in joined.arrays.items():
        of_both = len(whole.arrays[name]) + len(others.arrays[name])
        assert len(array) == of_both - (name == "offsets"), name
    assert again.learns == joined.learns == whole.learns and again.digest == whole.digest
    documents = joined.as_documents
    assert documents.columns.keys() == {"of_token", "of_document"} and documents.learns == "all"
    for name, column in documents.columns.items():
        assert column.values.tolist() == joined.columns[name].values.tolist()
    assert TokenizedRows.from_arrays(joined.arrays, joined.learns).digest == joined.digest
    without = {name: column for name, column in others.columns.items() if name != "of_row"}
    with pytest.raises(ValueError, match="of_row"):
        join_rows([whole, dataclasses.replace(others, columns=without)])
    with pytest.raises(ValueError, match="other documents"):
        join_rows([whole, dataclasses.replace(others, learns="all")])
    assert join_rows([NO_ROWS, whole]).digest == whole.digest


@pytest.mark.quick
def test_no_name_of_a_micro_batch_means_two_things():
    pairs = dataclasses.replace(filled(2, 100), learns="all")
    pairs = dataclasses.replace(pairs, input_ids=np.zeros_like(pairs.input_ids))
    answers = dataclasses.replace(pairs, splits=NO_ROWS.splits)
    answers = answers.with_columns("row", advantages=np.arange(2))
    of_documents = concatenate_rows(pairs, [0, 1], pad_token_id=1, shares_prompts=True).documents
    of_targets = concatenate_rows(answers, [0, 1], pad_token_id=1).target_values
    assert "own_tokens" in of_documents and "advantages" in of_targets
    assert not of_documents.keys() & of_targets.keys()


@pytest.mark.quick
def test_shared_prompts_are_planned_once_if_attention_allows():
    generator = np.random.default_rng(0)
    splits, others = generator.integers(2, 9, size=(2, 5000))
    offsets = np.cumsum([0, *(splits + others)])
    ids = generator.integers(3, size=offsets[-1], dtype=np.int32)
    ids[offsets[:-1]] = ids[offsets[:-1] + splits] = 0  # as a text begins
    pairs = TokenizedRows(ids, np.ones(len(ids), np.bool_), offsets, np.arange(5000), splits)
    sides = np.split(ids, pairs.document_offsets[1:-1])
    expected = [
        sum(1 for _ in itertools.takewhile(bool, map(np.equal, *pair)))
        for pair in zip(sides[::2], sides[1::2], strict=True)
    ]
    assert pairs.num_shared.tolist() == expected

    def longest(implementation: str | None, **options: Any) -> Lengths:
        config = TrainConfig(batch_size=1, num_epochs=1, **{"objective": "dpo", **options})
        rows = dataclasses.replace(
            pairs, learns="first_document" if config.objective == "kto" else "all"
        )
        data = RunData(rows, np.arange(len(pairs)))
        schedule = make_schedule(config, data, 1)
        shares_tokens = can_share(implementation)
        return RunRows(config, data, schedule, shares_tokens=shares_tokens).longest()

    shared = longest(VARLEN)
    assert (
        shared.num_computed == (splits + others - expected).max()
        and sum(shared.of_documents) > shared.num_computed
    )
    assert longest(FLASH) == Lengths([8, 8]) == longest(None, batching="padded")
    assert longest(VARLEN, objective="kto") == Lengths([8])


LABELED: list[dict[str, Any]] = [
    {"prompt": "hi", "completion": " go", "label": True},
    {"prompt": "so", "completion": " no", "label": False},
    {"prompt": [ASKED], "completion": [GO], "label": "true"},
    {"messages": [ASKED, NO], "label": 0},
]


def labels_of(rows: TokenizedRows) -> list[bool]:
    labels: list[bool] = rows.columns["desired"].values.tolist()
    return labels


@pytest.mark.quick
def test_kto_rows_are_paired_with_another_rows_answer(tmp_path):
    (rows, _) = prepared(LABELED, tmp_path, objective="kto")
    tokenizer = spelled_tokenizer("byte_level")
    assert rows.learns == "first_document"
    assert labels_of(rows) == [True, False, True, False]
    texts = [
        tokenizer.decode(rows.input_ids[slice(*rows.document_offsets[i : i + 2])])
        for i in range(2 * len(LABELED))
    ]
    assert texts[::2] == ["<s>hi go</s>", "<s>so no</s>", "[u]hi[a]go</s>", "[u]hi[a]no</s>"]
    assert texts[1::2] == ["<s>hino</s>", "<s>so go</s>", "[u]hi[a] no</s>", "[u]hi[a]go</s>"]
    learned = concatenate_rows(rows, [1, 2], pad_token_id=1)
    assert learned.desired.tolist() == [0, 1]
    assert learned.num_targets == rows.document_targets[[2, 4]].tolist()
    others = concatenate_rows(rows.as_documents, [3, 5], pad_token_id=1)
    assert others.num_targets == rows.document_targets[[3, 5]].tolist()
    completed = [
        {"messages": [ASKED], "completion": [NO], "label": 1.0},
        {"messages": [ASKED, GO], "label": 0.0},
    ]
    assert labels_of(prepared(completed, tmp_path, objective="kto")[0]) == [True, False]
    assert "row 2, not desired" in describe_sample(rows, 1, tokenizer)
    unlabeled = {"prompt": "hi", "completion": " go", "label": None}
    said = r"(?s)1 of 5 rows.*label is None, and can be true or false"
    with pytest.raises(UserError, match=said):
        prepared([*LABELED, unlabeled], tmp_path, objective="kto")
    with pytest.raises(UserError, match=r"its label is false.*--objective kto on both"):
        prepared(LABELED[:2], tmp_path, objective="sft")


# Ratings of WORDS -> the chosen and the rejected one, or why the row is bad at a threshold of 7.
RATED: list[tuple[tuple[object, ...], str]] = [
    ((8, 3.5, 5), " go over no"),
    (("2", 9, 9.0), " no over go"),
    ((7, 6.99), " go over no"),
    ((5, 5), "no two answers have different ratings"),
    ((9, 7), "all answers are rated at least 7"),
    ((6.9, -1), "all answers are rated below 7"),
    ((8, None), "rating is None, and can be a number"),
    ((8, "nan"), "rating is 'nan', and can be a number"),
]
COMPLETIONS = [
    {
        "prompt": "hi",
        "completions": [
            {"response": w, COLUMNS["rating"][i % 3]: r} for w, r in zip(WORDS, each, strict=False)
        ],
    }
    for i, (each, _) in enumerate(RATED)
]


@pytest.mark.quick
def test_the_best_rated_answer_is_chosen_over_the_worst(tmp_path):
    rows, report = prepared(COMPLETIONS, tmp_path, rating_threshold=7.0, max_bad_rows=0.7)
    sides = np.split(rows.input_ids, rows.document_offsets[1:-1])
    texts = [str(spelled_tokenizer("byte_level").decode(ids)) for ids in sides]
    found = [a[5:-4] + " over" + b[5:-4] for a, b in zip(texts[::2], texts[1::2], strict=True)]
    reasons = {number: reason for reason, numbers in report.rejected.items() for number in numbers}
    found += [reasons[number] for number in sorted(reasons)]
    assert found == [expected for _, expected in RATED]
    lower, _ = prepared(COMPLETIONS, tmp_path, rating_threshold=5.5, max_bad_rows=0.7)
    assert lower.row_numbers.tolist() == [1, 2, 6]
    with pytest.raises(UserError, match="5 of 8 rows cannot be used"):
        prepared(COMPLETIONS, tmp_path, rating_threshold=7.0)


@pytest.mark.quick
def test_an_answer_is_desired_from_the_threshold_on(tmp_path):
    for name in COLUMNS["rating"]:
        desired = {"prompt": "hi", "completion": " go", name: 7}
        rows = [desired, {"messages": [ASKED, NO], name: "6.9"}]
        rated_rows, _ = prepared(rows, tmp_path, objective="kto", rating_threshold=7.0)
        assert labels_of(rated_rows) == [True, False]
    listed, report = prepared(COMPLETIONS[:2], tmp_path, objective="kto", rating_threshold=5.0)
    assert labels_of(listed) == [True, False, True, False, True, True]
    assert report.num_apart == 4
    assert listed.row_numbers.tolist() == [1, 1, 1, 2, 2, 2]
    for objective, rated, cure in (
        ("kto", rows, "kto"),
        ("kto", COMPLETIONS, "kto"),
        ("dpo", COMPLETIONS, "dpo"),
        ("sft", COMPLETIONS, "dpo"),
    ):
        said = f"its answers have ratings.* --rating_threshold 7 --objective {cure}"
        with pytest.raises(UserError, match=said):
            prepared(rated, tmp_path, objective=objective)
    of_kto = TrainConfig(objective="kto", dataset_format="rating")
    for wrong in (TrainConfig(rating_threshold=7.0), of_kto):
        assert "--rating_threshold" in check(wrong)[0]


@pytest.mark.quick
def test_samples_show_chosen_and_rejected(tmp_path):
    rows, _ = prepared([ROWS[0][0]], tmp_path)
    text = describe_sample(rows, 0, spelled_tokenizer("byte_level"))
    assert text.count("Sample: row 1, ") == 2 and "row 1, rejected, " in text
    assert text.index(" go</s>") < text.index("rejected") < text.index(" no</s>")


def test_formats_are_told_from_the_columns_and_chats_are_recorded_as_such(tmp_path):
    for row, (text, _) in ROWS:
        name = RequestedFormat().find(list(row), [row]).dataset_format
        assert FORMATS[name].row_kind.name == "pairs"
        is_chat = "[a]" in text
        report = prepared([row], tmp_path, prompt_template="chat")[1]
        assert report.is_chat is is_chat and not report.is_filled
        record = prompt_record(name, ChosenTemplate("chat"), is_chat=is_chat)
        assert record["kind"] == ("chat" if is_chat else "text")
    rows, report = prepared([ROWS[2][0]], tmp_path)  # of any other model
    assert report.is_filled and not report.is_chat
    assert prompt_record("preference", ChosenTemplate(), is_filled=True)["kind"] == "template"
    text = spelled_tokenizer("byte_level").decode(rows.input_ids)
    assert "### Instruction:\nhi\n\n### Response: go</s>" in text
