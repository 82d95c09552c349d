"""The shared-memory ring: index order, back-pressure, and peers that die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_engine.errors import EngineError, RoomError
from dflash_engine.processes import ProcessIdentity, process_identity
from dflash_engine.training.ring import MicroBatch, PeerDiedError, Ring, RingClosedError, RingShape, slot_of

SHAPE = RingShape(slots=2, rows=2, max_length=8, features=3)
FORK = multiprocessing.get_context("fork")


def me() -> ProcessIdentity:
    identity = process_identity(os.getpid())
    assert identity is not None
    return identity


def batch(index: int, length: int = 5) -> MicroBatch:
    generator = torch.Generator().manual_seed(index)
    return MicroBatch(
        index=index,
        input_ids=torch.randint(0, 99, (2, length), generator=generator),
        supervised=torch.rand(2, length, generator=generator) > 0.5,
        taps=torch.randn(2, length, 3, generator=generator),
        tokens=index + 1,
        capture_s=0.25,
    )


def test_a_micro_batch_arrives_bit_for_bit(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", SHAPE, create=True)
    writer = Ring(tmp_path / "ring", SHAPE)
    for index in range(5):
        sent = batch(index, length=3 + index)
        writer.put(sent, me())
        got, _ = ring.get(index, me())
        assert torch.equal(got.input_ids, sent.input_ids)
        assert torch.equal(got.supervised, sent.supervised)
        assert torch.equal(got.taps, sent.taps)
        assert (got.tokens, got.capture_s, got.usable) == (index + 1, 0.25, True)
        ring.release(index)


def test_a_writer_waits_for_exactly_its_slot(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", SHAPE, create=True)
    for index in (1, 0):  # the faster target rank comes first and must not take slot 0
        ring.put(batch(index), me())
    assert ring.depth() == 2
    third = threading.Thread(target=ring.put, args=(batch(2), me()), daemon=True)
    third.start()
    third.join(0.05)
    assert third.is_alive()
    assert ring.get(0, me())[0].index == 0
    ring.release(0)
    third.join(5)
    assert not third.is_alive()
    assert [ring.get(index, me())[0].index for index in (1, 2)] == [1, 2]


@pytest.mark.parametrize("first", [1, 2, 7])
def test_a_resumed_ring_begins_with_any_micro_batch(tmp_path: Path, first: int) -> None:
    ring = Ring(tmp_path / "ring", SHAPE, create=True, first=first)
    for index in range(first, first + 5):
        ring.put(batch(index), me())
        assert ring.get(index, me())[0].index == index
        ring.release(index)


@given(drafters=st.integers(1, 4), slots=st.integers(1, 6))
def test_micro_batches_of_one_drafter_rank_fill_the_slots_in_turn(drafters: int, slots: int) -> None:
    for rank in range(drafters):
        own = [i for i in range(drafters * slots * 2) if i % drafters == rank]
        assert [slot_of(i, drafters, slots) for i in own] == [n % slots for n in range(len(own))]


def _write_then_die(path: Path, reader: ProcessIdentity) -> None:
    Ring(path, SHAPE).put(batch(0), reader)
    os.kill(os.getpid(), signal.SIGKILL)


def test_t10_a_killed_writer_is_named_after_all_it_published_was_read(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", SHAPE, create=True)
    process = FORK.Process(target=_write_then_die, args=(tmp_path / "ring", me()))
    process.start()
    writer = process_identity(process.pid or 0) or ProcessIdentity(process.pid or 0, 0, "")
    process.join()
    assert ring.get(0, writer)[0].index == 0
    with pytest.raises(PeerDiedError, match=f"the target rank .pid {process.pid}. is gone"):
        ring.get(1, writer)


def test_t10_a_writers_own_failure_reaches_the_reader_in_words(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", SHAPE, create=True)
    Ring(tmp_path / "ring", SHAPE).fail("MemoryError: no room for the states")
    with pytest.raises(PeerDiedError, match="the target rank failed: MemoryError: no room"):
        ring.get(0, me())


def test_a_dead_reader_ends_a_waiting_writer(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", SHAPE, create=True)
    process = FORK.Process(target=lambda: None)
    process.start()
    reader = process_identity(process.pid or 0) or ProcessIdentity(process.pid or 0, 0, "")
    process.join()
    ring.put(batch(0), reader)
    ring.put(batch(1), reader)
    with pytest.raises(PeerDiedError, match="the drafter rank"):
        ring.put(batch(2), reader)


def test_closing_ends_a_waiting_writer_quietly(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", SHAPE, create=True)
    for index in range(2):
        ring.put(batch(index), me())
    ring.close()
    with pytest.raises(RingClosedError):
        ring.put(batch(2), me())


def test_a_micro_batch_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", SHAPE, create=True)
    with pytest.raises(EngineError, match="2 x 9 does not fit slots of 2 x 8"):
        ring.put(batch(0, length=9), me())


def test_memory_that_cannot_be_had_is_an_error_at_the_start(tmp_path: Path, monkeypatch: Any) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    # Stands for a full /dev/shm, which a test may not make on a machine that others use.
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RoomError, match="No space left on device; free some, or lower pipeline.ring_slots"):
        Ring(tmp_path / "ring", SHAPE, create=True)
    assert not (tmp_path / "ring").exists()
