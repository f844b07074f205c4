"""The order in which requests are done: models by turns, each model's by their numbers."""

import time

import pytest

from fsdp_qlora.service import request_queue
from fsdp_qlora.service.records import QueuedRequest
from fsdp_qlora.service.request_queue import Busy, RequestQueue
from fsdp_qlora.service.wall_clock import WallClock, date_of
from fsdp_qlora.utils.errors import UserError

pytestmark = pytest.mark.quick
SESSIONS = ["0" * 32, "1" * 32, "2" * 32]


def passes(session: int, *numbers: int) -> list[QueuedRequest]:
    model = f"{SESSIONS[session]}:train:0"
    return [
        QueuedRequest(f"{model}:{number}", model, number, "forward_backward") for number in numbers
    ]


def samples(session: int, count: int) -> list[QueuedRequest]:
    sampler = f"{SESSIONS[session]}:sample:0"
    return [
        QueuedRequest(f"{sampler}:{number}", sampler, number, "asample") for number in range(count)
    ]


def queue(*waiting: QueuedRequest) -> RequestQueue:
    return RequestQueue(waiting, lambda model: 0)


def order(waiting: RequestQueue, count: int) -> list[tuple[int, int]]:
    """(session, number) of the next requests, each done before the next one is taken."""
    done = []
    for _ in range(count):
        request = waiting.take(0)
        assert request is not None
        waiting.is_over(request)
        done.append((SESSIONS.index(request.target[:32]), request.seq))
    return done


def test_models_take_turns_however_many_requests_each_has():
    waiting = queue(*passes(0, *range(300)))
    order(waiting, 5)
    for request in (*passes(1, 0, 1), *samples(2, 40)):
        waiting.add(request)
    found = order(waiting, 9)
    assert found.index((1, 0)) <= 2 and found.index((1, 1)) <= 5 and found.index((2, 0)) <= 2
    assert [number for session, number in found if session == 0] == [5, 6, 7, 8]
    assert len(order(waiting, (300 - 9) + (40 - 3))) == 328
    assert waiting.take(0) is None


def test_requests_of_a_model_are_done_by_their_numbers():
    waiting = queue(*passes(0, 2, 1, 0))
    assert order(waiting, 3) == [(0, 0), (0, 1), (0, 2)]
    for request in passes(0, 5, 4):
        waiting.add(request)
    assert waiting.take(0) is None
    waiting.add(*passes(0, 3))
    assert order(waiting, 3) == [(0, 3), (0, 4), (0, 5)]
    assert not waiting.add(*passes(0, 1))  # its turn has passed
    assert waiting.take(0) is None


def test_a_hole_fails_what_is_behind_it_after_a_while(monkeypatch):
    waiting = queue(*passes(0, 1, 2), *passes(1, 0))
    assert waiting.take_late() == []
    now = time.monotonic()
    monkeypatch.setattr(request_queue.time, "monotonic", lambda: now + 3600)
    [late] = waiting.take_late()
    assert late.request.seq == 1 and "request 0" in late.reason
    waiting.is_over(late.request)
    assert sorted(order(waiting, 2)) == [(0, 2), (1, 0)]


def test_requests_far_ahead_are_refused_and_passed_ones_given_up():
    waiting = queue(*passes(0, 0, 1))
    with pytest.raises(UserError, match="ahead"):
        waiting.check(*passes(0, 20_000))
    waiting.check(*passes(0, 9_000))
    after_a_kill = RequestQueue(passes(0, 3, 7), lambda model: 5)
    [late] = after_a_kill.take_late()
    assert late.request.seq == 3
    after_a_kill.is_over(late.request)
    assert after_a_kill.number_of(passes(0, 0)[0].target) == 5


def test_a_session_that_fills_the_queue_is_told_to_wait():
    waiting = queue()
    large = [request._replace(size=2**30) for request in passes(0, 0, 1, 2)]
    for request in large[:2]:
        waiting.check(request)
        waiting.add(request)
    with pytest.raises(Busy):
        waiting.check(large[2])
    waiting.check(passes(1, 0)[0]._replace(size=2**30))  # another one is not concerned
    order(waiting, 1)
    waiting.check(large[2])
    order(waiting, 1)
    assert not waiting._counts and not waiting._bytes


def test_cancelled_samples_leave_nothing_behind():
    waiting = queue(*samples(0, 2))
    assert waiting.remove_sample(samples(0, 2)[0].id) is not None
    assert waiting.remove_sample("x") is None
    assert order(waiting, 1) == [(0, 1)]
    assert not waiting._turns and not waiting._of_samplers
    waiting.forget_idle()
    assert not waiting._next


def test_a_clock_that_jumps_changes_no_expiry(monkeypatch):
    clock = WallClock()
    before = time.time()
    monkeypatch.setattr(time, "time", lambda: before + 10**9)
    assert abs(clock.now() - before) < 60


@pytest.mark.parametrize("seconds", [1e18, 10.0**300, float("inf")])
def test_dates_beyond_the_calendar_are_its_end(seconds):
    assert date_of(seconds).startswith("9999")
