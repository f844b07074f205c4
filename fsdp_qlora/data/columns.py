"""The names of columns in datasets, by what is in them.

Formats, and what is read or watched beside them, take their names from here.
"""

from typing import Literal

Role = Literal[
    "prompt",
    "turns",
    "asks alone",
    "teacher",
    "sides",
    "rating",
    "label",
    "mask",
    "context",
    "system",
    "tools",
    "history",
    "images",
    "sound or video",
    "other question",
    "choices",
    "right answer",
]

# Raise cache.CACHE_VERSION when names or their order change: cached rows hold the old ones.
COLUMNS: dict[Role, tuple[str, ...]] = {
    # The first that is filled is the prompt of given answers, as where texts are rows.
    "prompt": (
        "instruction",
        "conversations",
        "question",
        "prompt",
        "query",
        "problem",
        "messages",
        "input",
    ),
    # Prompts with turns, of which the answers at the end are none.
    "turns": ("conversations", "messages"),
    # Prompts also where no answer is beside them: other columns, such as source, are mostly
    # something else then.
    "asks alone": ("query", "problem", "input", "inputs", "conversation", "contents"),
    # The prompt and the system prompt that a teacher sees instead of the student's.
    "teacher": ("teacher_prompt", "teacher_system"),
    "sides": ("chosen", "rejected"),
    # The number of a rated answer.
    "rating": ("rating", "score", "overall_score"),
    "label": ("label",),
    # Which tokens are learned.
    "mask": ("completion_mask", "assistant_masks", "loss_mask"),
    # What a prompt may have beside it. Formats name one of these, and the others are read as it.
    "context": ("input", "context"),
    "system": ("system", "system_prompt"),
    "tools": ("tools", "functions"),
    "history": ("history",),
    "images": ("images", "image"),
    # These are not read; rows in which one is filled are refused.
    "sound or video": ("audios", "audio", "videos", "video"),
    "other question": ("query",),
    "choices": ("options",),
    # Reward functions take the first that a row has.
    "right answer": ("answer", "solution", "target", "label", "output", "response"),
}

# Well-known sets that call the columns of a format otherwise: the format, and their names in the
# order of `Format.columns`. They are tried in this order where the columns are of no format.
# Formats of logs are among them, with no other names: datasets with other columns, too, are of
# those.
OTHER_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("question_answer", ("question", "response")),  # OpenOrca
    ("question_answer", ("question", "solution")),  # s1K
    ("question_answer", ("question", "answers")),  # SQuAD
    ("alpaca", ("query", "response")),  # MetaMath, ms-swift
    ("alpaca", ("query", "answer")),  # CodeFeedback
    ("alpaca", ("problem", "solution")),  # Magicoder
    ("alpaca", ("prompt", "response")),  # HelpSteer
    ("responses", ()),  # where input or output hold items
    ("alpaca", ("input", "output")),
    ("alpaca", ("inputs", "targets")),  # FLAN
    ("alpaca", ("source", "target")),
    ("alpaca", ("user", "assistant")),
    ("sharegpt", ("conversation",)),  # LMSYS, WildChat, Capybara, ms-swift
    ("messages", ("contents",)),  # Gemini
    ("preference", ("chosen_messages", "rejected_messages")),
    ("preference", ("chosen_response", "rejected_response")),  # argilla's UltraFeedback
    ("preference", ("response_j", "response_k")),  # StackExchange's
    *(("rating", (name,)) for name in (*COLUMNS["rating"][1:], "completions")),
    ("text", ("response",)),  # ms-swift, for pretraining
    ("items", ()),
    ("request_response", ()),
    ("atif", ()),
    ("verifiers", ()),
    ("items", ("input",)),  # OpenAI's responses
)

_WITH_OTHER_NAMES: tuple[Role, ...] = ("context", "system", "tools", "images")
# They change what an answer means. A row in which one is filled and not used would be learned in a
# wrong sense.
_WATCHED: tuple[Role, ...] = (
    *_WITH_OTHER_NAMES,
    "history",
    "other question",
    "choices",
    "label",
    "sound or video",
)

INSTRUCTIONS = tuple(
    name for name in COLUMNS["prompt"] if name not in (*COLUMNS["turns"], "prompt")
)
"""Prompts that are filled into a template, as where texts are rows."""
SYNONYMS = {
    name: tuple(other for other in COLUMNS[role] if other != name)
    for role in _WITH_OTHER_NAMES
    for name in COLUMNS[role]
}
"""A column that may be beside a prompt -> its other names."""
MEDIA = (*COLUMNS["images"], *COLUMNS["sound or video"])
WATCHED = tuple(name for role in _WATCHED for name in COLUMNS[role])
"""Columns that may not be filled where they are not used."""
NOT_ASKED = (*COLUMNS["label"], *COLUMNS["other question"])
"""Watched columns that may be filled beside a prompt: an answer, and another prompt."""
ANSWERS = COLUMNS["right answer"]
