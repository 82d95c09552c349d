"""Which documents a micro-batch holds: a pure function of seed and index, so that every rank and every
resumed job agrees without talking."""

from __future__ import annotations

import functools
import hashlib
import random

__all__ = ["BatchOrder", "derived_seed"]


def derived_seed(seed: int, *what: int | str) -> int:
    """A 63-bit seed for one purpose: a counter-based generator needs no state in a checkpoint."""
    text = ":".join(str(part) for part in (seed, *what))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class BatchOrder:
    """An endless stream of documents, each epoch a new permutation, cut into micro-batches of `rows`."""

    def __init__(self, documents: int, rows: int, seed: int) -> None:
        if documents < 1 or rows < 1:
            raise ValueError(f"{documents} documents in rows of {rows}: both must be at least 1")
        self._documents = documents
        self._rows = rows
        self._permutation = functools.lru_cache(maxsize=2)(functools.partial(_permutation, documents, seed))

    def positions(self, micro_batch: int) -> range:
        """Positions in the endless stream that this micro-batch covers."""
        return range(micro_batch * self._rows, (micro_batch + 1) * self._rows)

    def document_at(self, position: int) -> int:
        """Index of the document at a position of the stream."""
        epoch, within = divmod(position, self._documents)
        return self._permutation(epoch)[within]

    def epoch(self, micro_batch: int) -> float:
        """Epochs completed once this many micro-batches are done."""
        return micro_batch * self._rows / self._documents


def _permutation(documents: int, seed: int, epoch: int) -> list[int]:
    order = list(range(documents))
    random.Random(derived_seed(seed, "order", epoch)).shuffle(order)  # noqa: S311 # order of data, not a secret
    return order
