"""Reward functions: built-in ones and the user's own, called in a process of their own.

Each is called as TRL calls it: with the prompts, completions, completion_ids and columns of all
answers. Built-in ones read the right answer from the first column of ANSWERS that a row has. A
process can be ended whatever a function does: a pattern that backtracks holds the interpreter's
lock, so no thread could end it.
"""

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fsdp_qlora.data.columns import ANSWERS
from fsdp_qlora.distributed.supervision.clock import Worker, limit_memory
from fsdp_qlora.training.rl.reward_images import IMAGES, NAMES, RewardImages
from fsdp_qlora.utils.errors import RankError, RolloutError, UserError
from fsdp_qlora.utils.processes import end_with_parent
from fsdp_qlora.utils.redact import guard_output
from fsdp_qlora.utils.text import printable
from fsdp_qlora.utils.user_files import MEMORY_BYTES, reason, run_file

log = logging.getLogger("fsdp_qlora")

Batch = Mapping[str, Sequence[Any]]
"""The arguments of a reward function, a value for each answer: prompts, completions,
completion_ids, and columns; `NAMES` instead of images.
"""
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_WORD = re.compile(
    r"(?P<function>.+?)(=(?P<weight>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?))?", re.IGNORECASE
)
# In front of the result in GSM8K's answers (Cobbe et al. 2021).
_MARK = "####"
# Names of columns that may have the right answer, to be named in a message.
_LIKE_AN_ANSWER = re.compile(
    "answer|truth|gold|solution|label|target|expected|response|output|result", re.IGNORECASE
)


def text_of(completion: Any) -> str:
    """The text of an answer, which is a text or a list of messages: what the model says last."""
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message["role"] == "assistant"]
    return said[-1].get("content") or "" if said else ""


def _pairs(
    completions: Sequence[Any], columns: dict[str, Sequence[Any]]
) -> Iterator[tuple[str, str | None]]:
    """Each answer with the right one; None where its row has none."""
    names = [name for name in ANSWERS if name in columns]
    for place, completion in enumerate(completions):
        # Rows of a mixture may have their answers in different columns.
        values = [columns[name][place] for name in names if columns[name][place] is not None]
        yield text_of(completion), str(values[0]) if values else None


def exact_match(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 for the right answer, without blanks around it, else 0."""
    return [
        None if right is None else float(answer.strip() == right.strip())
        for answer, right in _pairs(completions, columns)
    ]


def number(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 if the last number of the answer equals the last one of the right answer, else 0.

    In GSM8K's answers it follows ####.
    """
    values: list[float | None] = []
    for answer, right in _pairs(completions, columns):
        expected = _last_number(right or "")
        values.append(None if expected is None else float(_last_number(answer) == expected))
    return values


def _last_number(text: str) -> Decimal | None:
    # Decimal: 1.10 and 1.1 are the same number, and neither is rounded.
    numbers = _NUMBER.findall(text.rpartition(_MARK)[2]) or _NUMBER.findall(text)
    return Decimal(re.sub(r"[$,]", "", numbers[-1])) if numbers else None


def regex(pattern: str) -> Callable[..., list[float]]:
    """1 if the whole answer is of a form, such as regex:<think>.*</think>.*, else 0."""
    form = re.compile(pattern, re.DOTALL)

    def matches(completions: Sequence[Any], **columns: Any) -> list[float]:
        texts = [text_of(completion).strip() for completion in completions]
        return [float(bool(form.fullmatch(text))) for text in texts]

    return matches


def length(tokens: str) -> Callable[..., list[float]]:
    """0 up to a number of tokens, then falling linearly to -1 at twice that number.

    In the manner of Yu et al. 2025, eq. 13, which punishes overlong answers softly.
    """
    most = int(tokens)
    if most < 1:
        raise ValueError("it is below 1")

    def penalties(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [max(-1.0, min(0.0, 1 - len(ids) / most)) for ids in completion_ids]

    return penalties


REWARDS: dict[str, Callable[..., Any]] = {"exact_match": exact_match, "number": number}
REWARD_FACTORIES: dict[str, Callable[[str], Callable[..., Any]]] = {
    "regex": regex,
    "length": length,
}
"""Each makes a function from the text after its name and a colon."""


class Reward(NamedTuple):
    """A function that scores answers."""

    name: str
    """Name in metrics."""
    weight: float
    """The factor of its values in the sum."""
    word: str
    """FILE.py:NAME, or the name of a built-in one."""

    @property
    def path(self) -> Path | None:
        """The file of the user's own function."""
        file = self.word.rpartition(":")[0]
        return Path(file).expanduser() if file.endswith(".py") else None


def parse_rewards(words: Sequence[str], option: str = "rewards") -> list[Reward]:
    """The functions of --rewards: FILE.py:function, or a built-in one, each perhaps with =WEIGHT.

    No file is read.

    Args:
        option: the one that gives the words, for messages.
    Raises:
        UserError: there is no such function, two have one name, or a weight is infinite.
    """
    rewards = list[Reward]()
    for word in words:
        match = _WORD.fullmatch(word)
        assert match is not None
        function = match["function"]
        reward = Reward(function.rpartition(":")[2], float(match["weight"] or 1), function)
        if not reward.path:
            # regex:PATTERN has its name in front of the colon, and the pattern may have others.
            reward = reward._replace(name=function.partition(":")[0])
            builtin(function, option)
        if not math.isfinite(reward.weight):
            raise UserError(f"--{option} {word}: the weight must be a finite number.")
        rewards.append(reward)
    names = [reward.name for reward in rewards]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(
            f"--{option}: two functions are called {min(twice)}, and so would be their metrics. "
            "Rename one."
        )
    return rewards


def builtin(word: str, option: str = "rewards") -> Callable[..., Any]:
    """A function of REWARDS, or made by one of REWARD_FACTORIES.

    Raises UserError if there is none.
    """
    name, colon, argument = word.partition(":")
    if colon and name in REWARD_FACTORIES:
        try:
            return REWARD_FACTORIES[name](argument)
        except (ValueError, re.error) as error:
            raise UserError(f"--{option} {word}: {argument} cannot be used: {error}.") from error
    if colon or name not in REWARDS:
        names = ", ".join([*REWARDS, *(f"{factory}:..." for factory in REWARD_FACTORIES)])
        raise UserError(
            f"--{option} {word}: there is no such function. Give FILE.py:function or one of "
            f"{names}."
        )
    return REWARDS[name]


def check_answers(
    rewards: Sequence[Reward], rows: Iterable[Mapping[str, Any]], option: str = "rewards"
) -> None:
    """Raise UserError if a function reads the right answer, and no row has one.

    Args:
        rows: columns of the prompts.
        option: as for `parse_rewards`.
    """
    reading = [reward.name for reward in rewards if reward.word in REWARDS]
    if not reading:
        return
    columns: dict[str, None] = {}
    for row in rows:
        if any(row.get(name) is not None for name in ANSWERS):
            return
        columns.update(dict.fromkeys(row))
    likely = [name for name in columns if _LIKE_AN_ANSWER.search(name)]
    chosen = likely[0] if likely else "COLUMN"
    raise UserError(
        f"--{option} {reading[0]}: no row has the right answer in a column {', '.join(ANSWERS)}. "
        f"They have: {', '.join(columns)}. Say which it is, such as --columns answer={chosen}."
    )


class Scorer(Worker):
    """Calls the reward functions on all answers of a generation, in a process that is kept.

    Args:
        words: of --rewards.
        zero_on_error: count a failing function's values as 0, with a warning, instead of ending the
            run.
        seconds: for each function and generation, and for each file.
        option: as for `parse_rewards`.
        of_rows: the dataset whose rows are scored, for messages.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        zero_on_error: bool,
        seconds: float,
        option: str = "rewards",
        of_rows: str = "the dataset",
    ) -> None:
        super().__init__(__name__, seconds)
        self.rewards = parse_rewards(words, option)
        self._zero_on_error = zero_on_error
        self._option = option
        self._of_rows = of_rows

    def start(self) -> list[str]:
        """Run the functions' files in the process, unless it has.

        Called in a thread that stays: the process ends with it.

        Returns:
            The functions as records name them, with the files' hashes.
        Raises:
            RankError: a file cannot be run in time, or has no such function.
        """
        replies = [(reward, self._ask(reward, {}, (), self._seconds)) for reward in self.rewards]
        for reward, reply in replies:
            if "error" in reply:
                raise RankError(f"--{self._option} {reward.word}: {printable(reply['error'])}")
        described = []
        for reward, reply in replies:
            # Without the folder, which may be another one on the next machine.
            name = Path(reward.word).name if reward.path else reward.word
            described.append(f"{name}={reward.weight:g} {reply['hash']}".strip())
        return described

    def score(self, batch: Batch, rows: Sequence[int]) -> dict[str, list[float | None]]:
        """The values of each function, None where it does not apply.

        rows: numbers of the prompts' rows, for messages.

        Raises:
            RolloutError: a function fails, takes too long, or gives something else than a number
                for each answer.
        """
        process = self._process
        try:
            return {reward.name: self._values(reward, batch, rows) for reward in self.rewards}
        finally:
            # A process that was started again here, after a fault, ends with this thread: better
            # now than in the middle of the next generation.
            if self._process is not process:
                self.close()

    def _values(self, reward: Reward, batch: Batch, rows: Sequence[int]) -> list[float | None]:
        """The values of a function; 0 for answers at which it fails, if that is not the end."""
        everywhere = range(len(rows))
        ends = time.monotonic() + self._seconds
        reply = self._ask(reward, batch, everywhere, self._seconds)
        if "error" not in reply:
            return list(reply["values"])
        places: Sequence[int] = reply.get("places", everywhere)
        if reply.get("raised") and not self._zero_on_error:
            places = self._first_failing(reward, batch, everywhere, ends) or everywhere
        # A row has several answers, but is named once; a message has room for a few.
        numbers = dict.fromkeys([rows[place] for place in places][:32])
        named = ", ".join(map(str, numbers))
        message = (
            f"The reward function {reward.name} failed at row {named} of {self._of_rows}: "
            f"{printable(reply['error'])}"
        )
        if not self._zero_on_error:
            raise RolloutError(
                f"{message}. No weight was updated. --on_reward_error zero counts such answers "
                "as 0."
            )
        log.warning("%s. %d answers count as 0.", message, len(places))
        return [0.0 if place in places else reply["values"][place] for place in everywhere]

    def _first_failing(
        self, reward: Reward, batch: Batch, places: Sequence[int], ends: float
    ) -> list[int]:
        """Find an answer for which a function fails when it gets this one alone.

        The values of these calls are not used. ends: the time after which no further one is tried.
        Returns the first place, in a list, which is empty if there is none.
        """
        for place in places:
            seconds = ends - time.monotonic()
            if seconds > 0 and "error" in self._ask(reward, batch, [place], seconds):
                return [place]
        return []

    def _ask(
        self, reward: Reward, batch: Batch, places: Sequence[int], seconds: float
    ) -> dict[str, Any]:
        """The reply about some of the answers; "error" says why there is none."""
        arguments = {
            column: [values[place] for place in places] for column, values in batch.items()
        }
        # default=str: columns may have dates and other values that JSON does not know.
        request = json.dumps({"reward": reward, "batch": arguments}, default=str)
        began = time.monotonic()
        reply, status = self._exchange(request, seconds)
        if reply:
            return dict(json.loads(reply))
        if time.monotonic() - began >= seconds:
            return {"error": f"it did not return within {seconds:g} s (--hang_minutes)"}
        return {"error": f"its process has ended (status {status})"}


# --- in the process ---


def work() -> None:
    """Answer requests: each line of stdin is one, each line of what was stdout its answer.

    Both are JSON.
    """
    end_with_parent()  # also if the run is killed
    # Functions must neither read requests nor write into replies: their input is empty, and what
    # they print goes to stderr.
    requests = os.fdopen(os.dup(0))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    guard_output()
    files = dict[Path, tuple[ModuleType, str]]()
    for line in requests:
        # Anew for each request, so that what the functions hold by now does not count.
        limit_memory(MEMORY_BYTES)
        request = json.loads(line)
        reward = Reward(*request["reward"])
        batch = request["batch"]
        try:
            function = _loaded(reward, files)
            if batch:
                reply = _score(function, batch)
            else:
                reply = {"hash": files[reward.path][1] if reward.path else ""}
        except UserError as error:
            reply = {"error": str(error)}
        print(json.dumps(reply), file=replies, flush=True)


def _loaded(reward: Reward, files: dict[Path, tuple[ModuleType, str]]) -> Callable[..., Any]:
    """A function to be called. Raises UserError if it cannot be used.

    files: those that have been run, with their hashes; a new one is added.
    """
    path = reward.path
    if path is None:
        return builtin(reward.word)
    if path not in files:
        files[path] = run_file(path)
    function = getattr(files[path][0], reward.name, None)
    if not callable(function):
        members = vars(files[path][0])
        names = [name for name, value in members.items() if callable(value) and name[0] != "_"]
        raise UserError(f"{path} has no function {reward.name!r}. It has: {', '.join(names)}.")
    return function


def _score(function: Callable[..., Any], batch: Batch) -> dict[str, Any]:
    """Call a function.

    Returns:
        "values"; with them "error" and "places" if some values are no numbers. Else "error" alone,
        and "raised" if the function has raised it.
    """
    arguments = dict(batch)
    if NAMES in arguments:
        arguments[IMAGES] = RewardImages(arguments.pop(NAMES))
    count = len(batch["completions"])
    scores = list[float | None]()
    bad = dict[int, str]()
    try:
        result = function(**arguments)
        # One can go over these, too, but they are no values in the order of the answers.
        if isinstance(result, str | bytes | bytearray | set | Mapping):
            raise TypeError(f"it returned a {type(result).__name__}, not a list of numbers")
        # A generator may have no end: one value too many is enough to know.
        values = list(islice(result, count + 1))
        number = len(result) if hasattr(result, "__len__") else len(values)
        for place, value in enumerate(values):
            scores.append(None if value is None else float(value))
            # float() takes texts of numbers, which a function returns by mistake.
            if isinstance(value, str | bytes) or not math.isfinite(scores[-1] or 0.0):
                bad[place] = f"it returned {value!r:.100}"
    except BaseException as error:
        return {"error": reason(error), "raised": True}
    if number != count:
        return {"error": f"it returned {number} values for {count} answers"}
    reply: dict[str, Any] = {"values": scores}
    if bad:
        places = list(bad)
        reply["error"] = bad[places[0]]
        reply["places"] = places
    return reply
