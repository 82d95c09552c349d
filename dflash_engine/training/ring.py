"""One ring of micro-batch slots in shared memory, from the target ranks to one drafter rank.

Each slot has a header and room for one micro-batch. Micro-batch i goes to slot (i div D) mod R of drafter
rank i mod D, and its writer waits until exactly that slot is free: a ring filled in order of arrival
deadlocks as soon as one target is faster than another. Flow control is two counters a slot in the same
memory; a full ring is back-pressure. Readers and writers poll with a short sleep, look after each other's
processes, and never wait for the dead.

Counters are aligned 8-byte words with one writer each, stored after the data that they announce. x86-64 keeps
that order; where the machine does not (Arm), the lock taken around each store and load is the barrier.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_engine.errors import EngineError, RoomError
from dflash_engine.processes import ProcessIdentity, is_alive

__all__ = ["MicroBatch", "PeerDiedError", "Ring", "RingClosedError", "RingShape", "slot_of"]

_MAGIC = 0x44464C5348303031
_GLOBAL_WORDS = 512  # magic, closed flag, then the failure text
_SLOT_WORDS = 16
_ERROR_BYTES = 2048
_POLL_FIRST_S, _POLL_LAST_S = 0.0002, 0.005
_LIVENESS_S = 0.5


class RingClosedError(Exception):
    """The reader has ended the training; writers stop quietly."""


class PeerDiedError(EngineError):
    """The process at the other end is gone or has failed."""


@dataclass(frozen=True)
class RingShape:
    """Capacity of a ring. The taps are float32 on a CPU."""

    slots: int
    rows: int
    max_length: int
    features: int
    """K * H_target: values of the concatenated taps at one position."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's payload: ids and supervision, then taps; a multiple of 64."""
        positions = self.rows * self.max_length
        return -(-(positions * (8 + 1) + positions * self.features * 4) // 64) * 64

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole ring."""
        return _GLOBAL_WORDS * 8 + self.slots * (_SLOT_WORDS * 8 + self.slot_bytes)


@dataclass(frozen=True)
class MicroBatch:
    """What a target rank hands over: b documents, right-padded to one length S."""

    index: int
    input_ids: Tensor
    """[b, S] int64."""
    supervised: Tensor
    """[b, S] bool, False on padding."""
    taps: Tensor
    """[b, S, K * H_target] float32."""
    tokens: int
    """Real tokens, padding not counted."""
    capture_s: float = 0.0
    """Seconds the target rank spent on this micro-batch; little when the states came from its cache."""
    wait_s: float = 0.0
    """Seconds the target rank waited for the slot."""
    usable: bool = True
    """False where the states are not finite: the trainer drops it and counts it."""


def slot_of(micro_batch: int, drafter_ranks: int, slots: int) -> int:
    """The slot of a micro-batch in its drafter rank's ring."""
    return (micro_batch // drafter_ranks) % slots


class Ring:
    """One mapping of the shared ring; create it in the reader, open it in the writers."""

    def __init__(
        self, path: Path, shape: RingShape, *, drafter_ranks: int = 1, create: bool = False, first: int = 0
    ) -> None:
        """`first` is the micro-batch with which the reader begins; a resumed job does not begin with 0."""
        self.shape = shape
        self._drafter_ranks = drafter_ranks
        self._barrier = threading.Lock()
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                _reserve(fd, path, shape.total_bytes)
            self._memory = mmap.mmap(fd, shape.total_bytes)
        finally:
            os.close(fd)
        words = np.frombuffer(self._memory, dtype=np.int64)
        self._words = words
        self._payload_start = (_GLOBAL_WORDS + shape.slots * _SLOT_WORDS) * 8
        if create:
            number = first // drafter_ranks
            for slot in range(shape.slots):
                # The first micro-batch that may enter a slot is the first from `first` on that belongs there.
                words[self._slot_word(slot, 1)] = number + (slot - number) % shape.slots
                words[self._slot_word(slot, 0)] = -1
            words[0] = _MAGIC
        elif words[0] != _MAGIC:
            raise EngineError(f"{path} is not a ring of this engine")

    def put(self, batch: MicroBatch, reader: ProcessIdentity) -> float:
        """Copy a micro-batch into its slot, waiting until that slot is free; returns the seconds waited.

        Raises RingClosedError once the reader has closed the ring, PeerDiedError where it is dead.
        """
        slot = slot_of(batch.index, self._drafter_ranks, self.shape.slots)
        number = batch.index // self._drafter_ranks
        waited = self._wait(lambda: self._load(slot, 1) == number, reader, "the drafter rank", ended=self._is_closed)
        rows, length = batch.input_ids.shape
        ids, supervised, taps = self._views(slot, rows, length)
        ids.copy_(batch.input_ids)
        supervised.copy_(batch.supervised)
        taps.copy_(batch.taps)
        head = self._slot_word(slot, 2)
        self._words[head : head + 5] = (batch.index, rows, length, batch.tokens, int(batch.usable))
        self._words[head + 5 : head + 7].view(np.float64)[:] = (batch.capture_s, batch.wait_s + waited)
        self._store(slot, 0, number)
        return waited

    def get(self, index: int, writer: ProcessIdentity) -> tuple[MicroBatch, float]:
        """The micro-batch of this index, as views into the ring, and the seconds waited for it.

        The views are good until `release(index)`. Raises PeerDiedError where the writer failed or is dead.
        """
        slot = slot_of(index, self._drafter_ranks, self.shape.slots)
        number = index // self._drafter_ranks
        waited = self._wait(lambda: self._load(slot, 0) == number, writer, "the target rank")
        head = self._slot_word(slot, 2)
        found, rows, length, tokens, usable = (int(word) for word in self._words[head : head + 5])
        capture_s, wait_s = (float(value) for value in self._words[head + 5 : head + 7].view(np.float64))
        if found != index:
            raise EngineError(f"ring slot {slot} holds micro-batch {found}, expected {index}")
        ids, supervised, taps = self._views(slot, rows, length)
        batch = MicroBatch(index, ids, supervised, taps, tokens, capture_s, wait_s, bool(usable))
        return batch, waited

    def release(self, index: int) -> None:
        """Give the slot of this micro-batch back to the writers."""
        slot = slot_of(index, self._drafter_ranks, self.shape.slots)
        self._store(slot, 1, index // self._drafter_ranks + self.shape.slots)

    def depth(self) -> int:
        """Slots that hold a micro-batch nobody has released."""
        return sum(self._load(slot, 0) == self._load(slot, 1) for slot in range(self.shape.slots))

    def close(self) -> None:
        """Tell the writers that no more is needed."""
        self._words[1] = 1

    def fail(self, message: str) -> None:
        """Leave the reason why a writer ends, for the reader to find."""
        text = message.encode()[: _ERROR_BYTES - 1]
        start = 16 * 8
        self._memory[start : start + len(text) + 1] = text + b"\x00"
        with self._barrier:
            self._words[2] = 1

    def _wait(
        self,
        ready: Callable[[], bool],
        peer: ProcessIdentity,
        who: str,
        ended: Callable[[], bool] = lambda: False,
    ) -> float:
        start = time.perf_counter()
        checked = start
        pause = _POLL_FIRST_S
        while not ready():
            if ended():
                raise RingClosedError
            if self._words[2]:
                raise PeerDiedError(f"{who} failed: {self._failure()}")
            now = time.perf_counter()
            if now - checked > _LIVENESS_S:
                checked = now
                # Once more after the look: what it published just before its end still counts.
                if not is_alive(peer) and not ready():
                    raise PeerDiedError(f"{who} (pid {peer.pid}) is gone; its end is in output.log")
            time.sleep(pause)
            pause = min(_POLL_LAST_S, pause * 1.2)
        return time.perf_counter() - start

    def _failure(self) -> str:
        raw = bytes(self._memory[16 * 8 : 16 * 8 + _ERROR_BYTES])
        return raw.split(b"\x00", 1)[0].decode(errors="replace")

    def _is_closed(self) -> bool:
        return bool(self._words[1])

    def _slot_word(self, slot: int, word: int) -> int:
        return _GLOBAL_WORDS + slot * _SLOT_WORDS + word

    def _load(self, slot: int, word: int) -> int:
        with self._barrier:
            return int(self._words[self._slot_word(slot, word)])

    def _store(self, slot: int, word: int, value: int) -> None:
        with self._barrier:
            self._words[self._slot_word(slot, word)] = value

    def _views(self, slot: int, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        if rows > shape.rows or length > shape.max_length:
            raise EngineError(
                f"a micro-batch of {rows} x {length} does not fit slots of {shape.rows} x {shape.max_length}"
            )
        start = self._payload_start + slot * shape.slot_bytes
        positions = rows * length
        ids = torch.frombuffer(self._memory, dtype=torch.int64, count=positions, offset=start)
        start += positions * 8
        taps = torch.frombuffer(self._memory, dtype=torch.float32, count=positions * shape.features, offset=start)
        start += positions * shape.features * 4
        supervised = torch.frombuffer(self._memory, dtype=torch.bool, count=positions, offset=start)
        return (
            ids.view(rows, length),
            supervised.view(rows, length),
            taps.view(rows, length, shape.features),
        )


def _reserve(fd: int, path: Path, size: int) -> None:
    """Allocate now: a page that cannot be had later would be a bus error in the middle of a run."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise RoomError(
            f"the ring needs {size / 2**20:.0f} MiB of shared memory in {path.parent}: {error.strerror}; "
            "free some, or lower pipeline.ring_slots, train.rows or data.max_length"
        ) from error
