"""A target rank: captures the states of its micro-batches and puts them into the drafter ranks' rings.

Rank j of T takes micro-batches j, j + T, j + 2T, ... It holds no state that a checkpoint would need, so it
can be killed at any time. Every document is captured alone: its states are a function of the document only,
whatever it shares a micro-batch with, and the same after a resume. Nothing is compiled on a CPU, so nothing is
padded for the target either; the drafter's rows are padded to a few lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_engine.data.batches import BatchOrder
from dflash_engine.data.chats import Document
from dflash_engine.processes import ProcessIdentity
from dflash_engine.training.ring import MicroBatch, Ring, RingClosedError

__all__ = ["BUCKET", "CaptureDocument", "StatesCache", "TargetWork", "bucket_length", "run_target_rank"]

BUCKET = 64
"""The drafter's rows are padded to multiples of this, so that a long run sees few shapes."""

CaptureDocument = Callable[[Tensor, int], Tensor]
"""(input_ids [1, S] int64, real length) -> taps [1, S, K * H_target] float32."""


def bucket_length(length: int) -> int:
    """The padded length of a row whose longest document has this length."""
    return -(-length // BUCKET) * BUCKET


@dataclass(frozen=True)
class TargetWork:
    """Which micro-batches this rank makes."""

    rank: int
    target_ranks: int
    first: int
    """First micro-batch of the job (a resumed one does not start at 0)."""
    end: int
    """One past the last micro-batch of the run."""

    def indices(self) -> Iterator[int]:
        """Micro-batches of this rank in index order."""
        offset = (self.rank - self.first) % self.target_ranks
        return iter(range(self.first + offset, self.end, self.target_ranks))


class StatesCache:
    """Captured states by document, as long as they fit into the given memory; 0 keeps nothing."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._states: dict[int, Tensor] = {}

    def get(self, document: int) -> Tensor | None:
        """Taps [length, K * H_target] of a document index, or None."""
        return self._states.get(document)

    def put(self, document: int, taps: Tensor) -> None:
        """Keep taps while there is room; what came first stays, since every epoch asks for all."""
        size = taps.numel() * taps.element_size()
        if self._held_bytes + size <= self._limit_bytes:
            self._states[document] = taps
            self._held_bytes += size


def run_target_rank(
    work: TargetWork,
    documents: tuple[Document, ...],
    order: BatchOrder,
    capture: CaptureDocument,
    cache: StatesCache,
    ring: Ring,
    reader: ProcessIdentity,
) -> None:
    """Serve micro-batches until the last one, or until the drafter rank closes the ring."""
    waited = 0.0
    for index in work.indices():
        start = time.perf_counter()
        chosen = [order.document_at(position) for position in order.positions(index)]
        taps = [_states(number, documents[number], capture, cache) for number in chosen]
        batch = _assemble(index, [documents[number] for number in chosen], taps, start, waited)
        try:
            waited = ring.put(batch, reader)
        except RingClosedError:
            return


def _states(number: int, document: Document, capture: CaptureDocument, cache: StatesCache) -> Tensor:
    held = cache.get(number)
    if held is not None:
        return held
    ids = torch.tensor([document.tokens])  # [1, length]
    taps = capture(ids, len(document.tokens))[0].contiguous()  # [length, K * H_target]
    cache.put(number, taps)
    return taps


def _assemble(index: int, documents: list[Document], taps: list[Tensor], start: float, waited: float) -> MicroBatch:
    length = bucket_length(max(len(document.tokens) for document in documents))
    rows = len(documents)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    supervised = torch.zeros(rows, length, dtype=torch.bool)
    states = torch.zeros(rows, length, taps[0].shape[1])
    for row, (document, tap) in enumerate(zip(documents, taps, strict=True)):
        n = len(document.tokens)
        ids[row, :n] = torch.tensor(document.tokens)
        supervised[row, :n] = torch.tensor(document.supervised)
        states[row, :n] = tap
    return MicroBatch(
        index=index,
        input_ids=ids,
        supervised=supervised,
        taps=states,
        tokens=sum(len(document.tokens) for document in documents),
        capture_s=time.perf_counter() - start,
        wait_s=waited,
        usable=all(bool(torch.isfinite(tap).all()) for tap in taps),
    )
