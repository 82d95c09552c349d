"""The board: what observations add up to, whoever made them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_console.core.attention import attention
from dflash_console.core.board import Board, Roles
from dflash_console.core.observations import (
    CheckpointSeen,
    CheckpointsSeen,
    EventSeen,
    HostSeen,
    JobReset,
    JobSeen,
    JobsSeen,
    LoadSeen,
    Observation,
    PromptSeen,
    ResultSeen,
    Said,
    TransferSeen,
)


class Clock:
    """A board's clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> Board:
    board = Board("lab", {"ct200": Roles(train=True), "ct129": Roles(evaluate=True)}, clock)
    for host in ("ct200", "ct129"):
        board.apply(HostSeen(host, "up"))
    return board


def train_job(job: str = "t1", state: str = "running", created: float = 1_000_000.0, reason: str = "") -> JobSeen:
    return JobSeen(job, "train", "demo", state, reason, created)


def eval_job(job: str = "e1", state: str = "running", step: int = 5, created: float = 1_000_000.0) -> JobSeen:
    return JobSeen(job, "evaluate", "", state, "", created, f"demo:step_{step}")


def event(kind: str, job: str = "t1", host: str = "ct200", t: float = 1_000_000.0, **data: Any) -> EventSeen:
    return EventSeen(host, job, t, kind, data)


def step(n: int, job: str = "t1", t: float = 1_000_000.0, **data: Any) -> EventSeen:
    return event(
        "train.step", job, t=t, **({"step": n, "loss": 3.0, "tokens": 100, "step_s": 0.1, "wait_s": 0.0} | data)
    )


def checkpoint(step: int, state: str = "whole", reason: str = "") -> CheckpointSeen:
    return CheckpointSeen("demo", f"step_{step}", step, state, reason, 1000, 1_000_000.0)


def result(job: str, step: int, tau: float, comparable: str = "same") -> ResultSeen:
    rows = [PromptSeen("a", tau, [1, 2]), PromptSeen("b", tau, [2, 2])]
    return ResultSeen("ct129", job, f"demo:step_{step}", tau, tau, 4, 7, 4, [0, 1, 3], [0.5], rows, comparable)


def test_a_resumed_job_takes_back_what_earlier_ones_recorded_after_its_start_step(board: Board) -> None:
    board.apply(JobsSeen("ct200", [train_job("t1", "failed", 1.0), train_job("t2", "running", 2.0)]))
    for n in range(1, 9):
        board.apply(step(n, "t1", loss=10.0 + n))
    board.apply(event("job.started", "t2", start_step=5))
    for n in range(6, 8):
        board.apply(step(n, "t2", loss=1.0))
    curve = board.runs["ct200", "demo"].curve
    assert list(curve.columns["step"]) == [1, 2, 3, 4, 5, 6, 7]
    assert list(curve.columns["loss"]) == [11, 12, 13, 14, 15, 1, 1]
    assert curve.tokens == 700


def test_jobs_may_be_read_in_any_order(board: Board) -> None:
    board.apply(JobsSeen("ct200", [train_job("t1", "failed", 1.0), train_job("t2", "running", 2.0)]))
    board.apply(event("job.started", "t2", start_step=2))
    board.apply(step(3, "t2", loss=1.0))
    for n in range(1, 4):
        board.apply(step(n, "t1", loss=9.0))
    assert list(board.runs["ct200", "demo"].curve.columns["loss"]) == [9, 9, 1]


def test_times_of_events_are_moved_to_this_machines_clock(board: Board) -> None:
    board.apply(HostSeen("ct200", "up", clock_offset_s=3600.0))
    board.apply(JobsSeen("ct200", [train_job()]))
    board.apply(step(1, t=1_003_600.0))
    assert board.runs["ct200", "demo"].last_t == 1_000_000.0


def test_unreachable_is_not_failed(board: Board, clock: Clock) -> None:
    board.apply(JobsSeen("ct200", [train_job()]))
    board.apply(step(1))
    board.apply(HostSeen("ct200", "unreachable", "ct200: refuses the connection", retry_s=4.0))
    clock.now += 7200
    run = board.runs["ct200", "demo"]
    assert run.is_live
    assert run.job.state == "running"
    found = attention(board)
    assert [item.key for item in found] == [("host", "ct200")]
    assert "unreachable for 2.0 h" in found[0].text
    assert "refuses the connection" in found[0].text


def test_an_outage_counts_from_its_first_failure_through_all_retries(board: Board, clock: Clock) -> None:
    board.apply(HostSeen("ct200", "unreachable", "gone", retry_s=1.0))
    began = clock.now
    for _ in range(3):
        clock.now += 5
        board.apply(HostSeen("ct200", "connecting"))
        assert board.hosts["ct200"].state == "unreachable"
        board.apply(HostSeen("ct200", "unreachable", "gone", retry_s=1.0))
    assert board.hosts["ct200"].since == began
    assert sum("unreachable" in line.text for line in board.log) == 1
    clock.now += 1
    board.apply(HostSeen("ct200", "up"))
    assert board.hosts["ct200"].since == clock.now


def test_newest_usable_skips_what_is_incomplete(board: Board) -> None:
    partial = CheckpointSeen("demo", "step_9.partial-x", None, "incomplete", "being written", 10, 1.0)
    board.apply(CheckpointsSeen("ct200", [checkpoint(4), checkpoint(6), checkpoint(8, "incomplete"), partial]))
    board.apply(CheckpointsSeen("ct129", [checkpoint(4, "model only")]))
    newest = board.newest_usable("demo")
    assert newest is not None
    assert newest.name == "step_6"
    on_evaluator = board.newest_usable("demo", "ct129")
    assert on_evaluator is not None
    assert on_evaluator.name == "step_4"
    assert [state.name for state in board.checkpoints_of("demo")] == ["step_8", "step_6", "step_4", "step_9.partial-x"]


def test_a_checkpoint_that_a_host_has_no_more_is_no_more_shown_there(board: Board) -> None:
    board.apply(CheckpointsSeen("ct200", [checkpoint(4), checkpoint(6)]))
    board.apply(CheckpointsSeen("ct129", [checkpoint(4, "model only")]))
    board.apply(CheckpointsSeen("ct200", [checkpoint(6)]))
    assert set(board.checkpoints["demo", "step_4"].copies) == {"ct129"}
    board.apply(CheckpointsSeen("ct129", []))
    assert ("demo", "step_4") not in board.checkpoints


def test_the_five_steps_and_tau_fill_in(board: Board) -> None:
    board.apply(JobsSeen("ct129", [eval_job()]))
    evaluation = board.evaluations["ct129", "e1"]

    def tell(n: int, state: str, t: float, **data: Any) -> None:
        board.apply(event("eval.step", "e1", "ct129", t, n=n, name="x", state=state, **data))

    tell(1, "started", 1.0)
    assert evaluation.current == 1
    tell(1, "done", 4.0)
    tell(2, "started", 4.0)
    tell(2, "cached", 4.5)
    tell(5, "started", 5.0)
    tell(5, "progress", 6.0, done=50, total=200, unit="tokens", eta_s=9.0, tau=1.5)
    assert [s.state for s in evaluation.steps] == ["done", "cached", "waiting", "waiting", "progress"]
    assert evaluation.steps[0].seconds == 3.0
    assert evaluation.steps[4].share == 0.25
    assert (evaluation.tau, evaluation.is_final) == (1.5, False)
    board.apply(event("eval.result", "e1", "ct129", tau=1.75))
    assert (evaluation.tau, evaluation.is_final) == (1.75, True)
    board.apply(result("e1", 5, 1.75))
    assert evaluation.result is not None


def test_a_result_is_held_against_the_nearest_earlier_step_that_is_comparable(board: Board) -> None:
    jobs = [eval_job(f"e{n}", "finished", n, float(n)) for n in (1, 2, 3, 4)]
    board.apply(JobsSeen("ct129", jobs))
    for n in (1, 2, 4):
        board.apply(result(f"e{n}", n, 1.0 + n / 10))
    board.apply(result("e3", 3, 1.3, comparable="other prompts"))
    latest = board.evaluations["ct129", "e4"]
    earlier = board.earlier_result(latest)
    assert earlier is not None
    assert earlier.checkpoint == "demo:step_2"
    assert board.earlier_result(board.evaluations["ct129", "e1"]) is None


def test_a_job_whose_file_was_replaced_starts_anew(board: Board) -> None:
    board.apply(JobsSeen("ct200", [train_job()]))
    board.apply(step(1))
    board.apply(JobReset("ct200", "t1"))
    assert board.runs["ct200", "demo"].curve.step is None


def test_a_job_that_the_host_has_no_more_is_forgotten(board: Board) -> None:
    board.apply(JobsSeen("ct200", [train_job()]))
    board.apply(JobsSeen("ct129", [eval_job()]))
    board.apply(JobsSeen("ct200", []))
    board.apply(JobsSeen("ct129", []))
    assert not board.runs
    assert not board.evaluations


def test_what_is_told_of_other_hosts_than_the_profiles_is_ignored(board: Board) -> None:
    board.apply(JobsSeen("stranger", [train_job()]))
    board.apply(LoadSeen("stranger", 0.5))
    assert not board.runs


def test_a_long_log_stays_bounded(board: Board) -> None:
    for n in range(5000):
        board.apply(Said(f"line {n}"))
    assert len(board.log) <= 2000
    assert board.log[-1].text == "line 4999"


class TestAttention:
    """What makes a line under NEEDS ATTENTION, and what does not."""

    def texts(self, board: Board) -> list[str]:
        return [f"{item.level} {item.subject} {item.text}" for item in attention(board)]

    def test_a_healthy_run_needs_nobody(self, board: Board, clock: Clock) -> None:
        board.apply(JobsSeen("ct200", [train_job()]))
        for n in range(1, 300):
            clock.now += 0.1
            board.apply(step(n, t=clock.now))
        assert self.texts(board) == []

    def test_a_slow_run_is_named_with_its_share_of_the_median_and_the_reason(self, board: Board, clock: Clock) -> None:
        board.apply(JobsSeen("ct200", [train_job()]))
        for n in range(1, 260):
            clock.now += 0.1
            board.apply(step(n, t=clock.now))
        for n in range(260, 285):
            clock.now += 0.2
            board.apply(step(n, t=clock.now, step_s=0.2, wait_s=0.15, ring_depth=0, ring_slots=8))
        (text,) = self.texts(board)
        assert "500 tokens/s, 50% of its median: waiting for data (ring 0/8)" in text

    def test_a_loss_that_is_not_a_number(self, board: Board) -> None:
        board.apply(JobsSeen("ct200", [train_job()]))
        board.apply(step(1, loss="NaN"))
        assert self.texts(board) == ["error ct200 demo  the loss of step 1 is nan"]

    def test_a_live_run_that_makes_no_step(self, board: Board, clock: Clock) -> None:
        board.apply(JobsSeen("ct200", [train_job()]))
        board.apply(step(1))
        clock.now += 59
        assert self.texts(board) == []
        clock.now += 40
        assert self.texts(board) == ["error ct200 demo  no step for 2 min; the job still runs"]

    def test_a_slow_model_may_take_its_time_between_steps(self, board: Board, clock: Clock) -> None:
        board.apply(JobsSeen("ct200", [train_job()]))
        for n in range(1, 20):
            clock.now += 30
            board.apply(step(n, t=clock.now, step_s=30.0))
        clock.now += 300
        assert self.texts(board) == []

    def test_a_job_that_ended_badly_until_another_one_of_the_run_works(self, board: Board) -> None:
        board.apply(JobsSeen("ct200", [train_job("t1", "lost", 1.0 + 1_000_000, "its supervisor is gone")]))
        assert self.texts(board) == ["error ct200 demo  lost: its supervisor is gone"]
        board.apply(JobsSeen("ct200", [train_job("t1", "lost", 1_000_001.0), train_job("t2", "running", 1_000_002.0)]))
        assert self.texts(board) == []

    def test_a_failed_evaluation_says_the_engines_reason(self, board: Board) -> None:
        board.apply(JobsSeen("ct129", [eval_job(state="running")]))
        board.apply(event("alert", "e1", "ct129", level="error", message="the target needs 54 GiB"))
        board.apply(JobsSeen("ct129", [eval_job(state="failed")]))
        assert self.texts(board) == ["error ct129 evaluation of demo:step_5 failed: the target needs 54 GiB"]

    def test_a_clock_that_is_off(self, board: Board) -> None:
        board.apply(HostSeen("ct200", "up", clock_offset_s=-7.25))
        assert "its clock is 7.2 s behind" in self.texts(board)[0]

    def test_a_disk_that_is_nearly_full(self, board: Board) -> None:
        board.apply(LoadSeen("ct200", disk_free_bytes=3 << 30))
        assert self.texts(board) == []
        board.apply(LoadSeen("ct200", disk_free_bytes=1 << 30))
        assert self.texts(board) == ["error ct200 1.1 GB of disk are free"]

    def test_a_failed_staging_until_the_copy_is_there(self, board: Board) -> None:
        failed = TransferSeen("x/step_5", "ct200", "ct129", "demo", "step_5", "failed", message="no room")
        board.apply(failed)
        assert self.texts(board) == ["error demo staging step_5 → ct129 failed: no room"]
        board.apply(CheckpointsSeen("ct129", [checkpoint(5, "model only")]))
        assert self.texts(board) == []

    def test_errors_come_first(self, board: Board) -> None:
        board.apply(HostSeen("ct200", "up", clock_offset_s=9.0))
        board.apply(HostSeen("ct129", "unreachable", "gone"))
        assert [item.level for item in attention(board)] == ["error", "warning"]


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.lists(st.integers(), max_size=3)
)
TYPES = ["job.started", "train.plan", "train.step", "train.checkpoint", "eval.step", "eval.result", "alert", "what"]
KEYS = ["step", "loss", "tokens", "step_s", "wait_s", "n", "state", "done", "total", "eta_s", "tau", "detail"]
KEYS += ["start_step", "steps", "checkpoint_every", "ring_depth", "ring_slots", "message", "level", "dropped", "epoch"]
EVENTS = st.builds(
    lambda kind, job, data: EventSeen("ct200", job, 5.0, kind, data),
    st.sampled_from(TYPES),
    st.sampled_from(["t1", "e1", "unknown"]),
    st.dictionaries(st.sampled_from(KEYS), VALUES),
)


def odd_board(events: list[Observation]) -> Board:
    """A board that heard anything that a host can write."""
    board = Board("lab", {"ct200": Roles(True, True)})
    board.apply(HostSeen("ct200", "up"))
    board.apply(JobsSeen("ct200", [train_job(), eval_job()]))
    for seen in events:
        board.apply(seen)
    return board


@given(st.lists(EVENTS, max_size=30))
def test_no_event_that_a_host_can_write_breaks_the_board(events: list[Observation]) -> None:
    board = odd_board(events)
    attention(board)
    run = board.runs["ct200", "demo"]
    steps = list(run.curve.columns["step"])
    assert steps == sorted(set(steps))
    assert run.next_checkpoint() is None or run.next_checkpoint()[0] > 0  # type: ignore[index]
    assert math.isnan(run.eta_s()) or math.isfinite(run.eta_s())
