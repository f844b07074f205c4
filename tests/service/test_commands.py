"""How a request becomes a command, and how the command reaches the other ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from fsdp_qlora.service import command_reader, parsed_requests
from fsdp_qlora.service.command_reader import Base
from fsdp_qlora.service.commands import (
    Command,
    CreateModel,
    DropModel,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Sample,
    SaveWeights,
    pack,
    unpack,
)
from fsdp_qlora.service.entries import AdapterSettings, SessionEntry
from fsdp_qlora.service.messages import Limits
from fsdp_qlora.service.records import QueuedRequest, Records
from fsdp_qlora.service.sampling import Drawing, SampleRequest
from fsdp_qlora.service.scheduler import Scheduler
from fsdp_qlora.service.train_request import TrainRequest, parse_train_request
from tests.service.harness import VOCABULARY, datums, training_message

pytestmark = pytest.mark.quick

MODEL = f"{'0' * 32}:train:0"
LIMITS = Limits(VOCABULARY, 128, 512, 65_536)
SETTINGS: AdapterSettings = {"rank": 2, "seed": 2**70, "train_attn": True, "train_mlp": False}
# Half a surrogate pair, which UTF-8 has not.
DRAWING = Drawing(8, 0.7, 0.9, 5, ["\ud83d", "end"])
COMMANDS: list[Command] = [
    CreateModel(MODEL, SETTINGS),
    LoadWeights(MODEL, "/folder", with_optimizer=True),
    LoadWeights(MODEL, "/folder", with_optimizer=False, settings=SETTINGS),
    OptimStep(MODEL, types.AdamParams(learning_rate=0.1 + 0.2)),
    SaveWeights(MODEL, "/folder", with_optimizer=True),
    DropModel(MODEL),
    Sample(
        DRAWING,
        (SampleRequest([1, 2], 3, "name", True, 4, 1), SampleRequest([5], 1, 7, False, 0, None)),
        "/folder",
        "request",
    ),
    Sample(Drawing(1, 0.0, 1.0, 0, [3, 4]), (), base=1),
]


def training_body(seq: int, *, likely: int = 0) -> bytes:
    message = training_message(MODEL, seq, datums(3, seq, likely=likely))
    return bytes(message.SerializeToString())


def sent(command: Command) -> Command:
    return unpack(np.frombuffer(pack(command), np.uint8))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: type(each).__name__)
def test_a_command_arrives_as_it_was_sent(command):
    assert sent(command) == command


@pytest.mark.parametrize("likely", [0, 3], ids=["one_target", "several"])
def test_arrays_of_a_training_request_arrive_bit_by_bit(likely):
    request = TrainRequest.read(parse_train_request(training_body(1, likely=likely)), LIMITS)
    arrived = sent(ForwardBackward(MODEL, 1, request))
    assert isinstance(arrived, ForwardBackward) and arrived.request is not None
    for name, array in request.values.items():
        own = arrived.request.values[name]
        assert own.dtype == array.dtype and own.flags.writeable
        np.testing.assert_array_equal(own, array)
    np.testing.assert_array_equal(arrived.request.tokens, request.tokens)
    assert [*map(tuple, arrived.request.shapes)] == [*request.shapes]
    logprobs = np.zeros(request.values["places"].shape, np.float32)
    assert arrived.request.encode(logprobs, {}) == request.encode(logprobs, {})


def started(folder: Path) -> Scheduler:
    """A scheduler whose model 0 is recorded."""
    records = Records(folder)
    session: SessionEntry = {"user_metadata": None, "display_name": None, "time": 0.0}
    records.sessions.put(MODEL[:32], session)
    records.models.put(MODEL, {"about": SETTINGS, "user_metadata": None, "time": 0.0})
    base = Base(["base"], "base", LIMITS)
    return Scheduler(records, folder, [base], max_rank=8, max_models=2, save_times=(0, 0.0))


def submit_training(scheduler: Scheduler, seq: int) -> None:
    body = training_body(seq)
    queued = QueuedRequest(f"{MODEL}:{seq}", MODEL, seq, "forward_backward", len(body))
    scheduler.submit(queued, body, parse_train_request(body))


def count_parses(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bodies that are parsed when it is their requests' turn."""
    parsed = list[bytes]()

    def counted(body: bytes) -> object:
        parsed.append(body)
        return parse_train_request(body)

    monkeypatch.setattr(command_reader, "parse_train_request", counted)
    return parsed


def create(scheduler: Scheduler) -> None:
    """Let the model be made, by its request 0."""
    content = {
        "session_id": MODEL[:32],
        "model_seq_id": 0,
        "base_model": "base",
        "lora_config": {"rank": 2},
    }
    scheduler.submit(
        QueuedRequest(f"{MODEL}:0", MODEL, 0, "create_model"), json.dumps(content).encode()
    )
    assert isinstance(scheduler.take(0.0), CreateModel)
    scheduler.finish([])


def test_a_body_is_parsed_once(tmp_path, monkeypatch):
    parsed = count_parses(monkeypatch)
    scheduler = started(tmp_path)
    create(scheduler)
    submit_training(scheduler, 1)
    command = scheduler.take(0.0)
    assert isinstance(command, ForwardBackward) and command.request is not None
    assert parsed == []  # it has been, when it came
    # No message is kept where too many wait.
    monkeypatch.setattr(parsed_requests, "_MAX_BYTES", 10)
    scheduler.finish([b"result"])
    submit_training(scheduler, 2)
    assert isinstance(scheduler.take(0.0), ForwardBackward) and len(parsed) == 1


def test_repeated_requests_are_read_one_at_a_time(tmp_path, monkeypatch):
    scheduler = started(tmp_path)
    create(scheduler)
    for seq in (1, 2):
        submit_training(scheduler, seq)
        scheduler.take(0.0)
        scheduler.finish([b"result"])
    scheduler.records._file.close()
    again = started(tmp_path)
    parsed = count_parses(monkeypatch)
    submit_training(again, 3)
    for count, seq in enumerate((0, 1, 2, 3)):
        command = again.take(0.0)
        # The third one was parsed as it came, and the repeated ones are when they are sent.
        assert len(parsed) == min(count, 2)
        assert getattr(command, "seq", 0) == seq
        again.finish([b"result"])
    assert again.take(0.0) is None


def test_a_message_of_many_empty_parts_is_not_kept():
    small = pb.ForwardBackwardRequest()
    large = pb.ForwardBackwardRequest()
    for _ in range(600_000):
        large.data.add()
    parsed = parsed_requests.ParsedRequests()
    for message in (small, large):
        parsed.put(str(len(message.data)), message, message.ByteSize())
    assert parsed.take("0") is small
    assert parsed.take("600000") is None
