"""The drafter rank: takes micro-batches from its ring in index order and trains the drafter on them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash_engine import layout
from dflash_engine.data.batches import BatchOrder, derived_seed
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.drafter.visibility import Visibility
from dflash_engine.errors import EngineError, RoomError
from dflash_engine.events import Alert, EventWriter, TrainCheckpoint, TrainStep
from dflash_engine.processes import ProcessIdentity
from dflash_engine.training.anchors import build_blocks, draw_anchors
from dflash_engine.training.checkpoints import Position, RunIdentity, save_checkpoint
from dflash_engine.training.loss import LossParts, block_loss
from dflash_engine.training.optimizer import DrafterOptimizer
from dflash_engine.training.recipe import Recipe
from dflash_engine.training.ring import MicroBatch, Ring

__all__ = ["DrafterTraining", "FrozenHead"]

_MAX_DROPPED_SHARE = 0.2


@dataclass(frozen=True)
class FrozenHead:
    """The target's embedding and head as the loss uses them."""

    embedding: Tensor
    """[V, H]."""
    rows: Tensor
    """[V', H]: the head, or the rows of it that compete (`loss.vocabulary = "data"`)."""
    row_of_id: Tensor
    """[V] int64: row of an id in `rows`; 0 for ids that never are labels."""

    @staticmethod
    def of(embedding: Tensor, head: Tensor, label_ids: list[int] | None) -> FrozenHead:
        """The whole head, or only the rows of these ids, ascending."""
        if label_ids is None:
            return FrozenHead(embedding, head, torch.arange(len(head)))
        ids = torch.tensor(label_ids)
        row_of_id = torch.zeros(len(head), dtype=torch.int64)
        row_of_id[ids] = torch.arange(len(ids))
        return FrozenHead(embedding, head[ids].contiguous(), row_of_id)


class DrafterTraining:
    """One job's training: from a position to the last step, or to a stop request."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        drafter: DFlashDrafter,
        optimizer: DrafterOptimizer,
        head: FrozenHead,
        order: BatchOrder,
        identity: RunIdentity,
        checkpoints: Path,
        control: Path,
        writer: EventWriter,
        position: Position,
    ) -> None:
        self._recipe = recipe
        self._drafter = drafter
        self._optimizer = optimizer
        self._head = head
        self._order = order
        self._identity = identity
        self._checkpoints = checkpoints
        self._control = control
        self._writer = writer
        self._position = position
        self._dropped = 0

    def run(self, ring: Ring, target_of: dict[int, ProcessIdentity]) -> Position:
        """Train until the recipe's last step or a stop request, saving as the recipe says; returns the position.

        `target_of` maps a target rank to its process. Raises EngineError where a target rank is gone or the
        last checkpoint cannot be written.
        """
        steps = self._recipe.train.steps
        if self._position.step == 0:
            self._save(last=False)
        while self._position.step < steps:
            self._step(ring, target_of)
            step = self._position.step
            stop = (self._control / layout.CONTROL_STOP).exists()
            asked = (self._control / layout.CONTROL_SAVE).exists()
            if stop or asked or step == steps or step % self._recipe.train.checkpoint_every == 0:
                self._save(last=stop or step == steps)
                (self._control / layout.CONTROL_SAVE).unlink(missing_ok=True)
            if stop:
                break
        ring.close()
        return self._position

    def _step(self, ring: Ring, target_of: dict[int, ProcessIdentity]) -> None:
        per_step = self._recipe.train.micro_batches_per_step
        first = self._position.step * per_step
        start = time.perf_counter()
        waited = forward = backward = capture_s = target_wait_s = 0.0
        tokens = correct = slots = 0
        numerator = weight = 0.0
        depth = ring.depth()
        for index in range(first, first + per_step):
            batch, wait_s = ring.get(index, target_of[index % len(target_of)])
            waited += wait_s
            tokens += batch.tokens
            capture_s += batch.capture_s
            target_wait_s += batch.wait_s
            if not batch.usable:
                self._drop(index)
                ring.release(index)
                continue
            began = time.perf_counter()
            parts = self._forward(batch)
            between = time.perf_counter()
            if parts.numerator.requires_grad:
                parts.numerator.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            ring.release(index)
            forward += between - began
            backward += time.perf_counter() - between
            numerator += float(parts.numerator.detach())
            weight += float(parts.weight)
            correct += int(parts.correct)
            slots += int(parts.slots)
        began = time.perf_counter()
        rate = norm = 0.0
        if weight > 0:
            rate, norm = self._optimizer.step(self._position.step, weight)
            if not math.isfinite(norm):
                self._drop(first)
        now = time.perf_counter()
        self._position = Position(self._position.step + 1, self._position.tokens_seen + tokens)
        self._writer.write(
            TrainStep(
                step=self._position.step,
                epoch=round(self._order.epoch(first + per_step), 4),
                loss=numerator / weight if weight else math.nan,
                accuracy=correct / slots if slots else math.nan,
                lr=rate,
                grad_norm=norm,
                tokens=tokens,
                tokens_per_s=round(tokens / (now - start), 1),
                step_s=round(now - start, 5),
                wait_s=round(waited, 5),
                forward_s=round(forward, 5),
                backward_s=round(backward, 5),
                optimizer_s=round(now - began, 5),
                ring_depth=depth,
                ring_slots=ring.shape.slots,
                capture_s=round(capture_s, 5),
                target_wait_s=round(target_wait_s, 5),
                dropped=self._dropped,
            )
        )

    def _forward(self, batch: MicroBatch) -> LossParts:
        recipe, config = self._recipe, self._drafter.config
        seed = recipe.train.seed
        anchors = [
            draw_anchors(batch.supervised[row], recipe.train.anchors, derived_seed(seed, "anchors", position))
            for row, position in enumerate(self._order.positions(batch.index))
        ]
        blocks = build_blocks(
            batch.input_ids,
            batch.supervised,
            anchors,
            count=recipe.train.anchors,
            block_size=config.block_size,
            mask_id=config.mask_token_id,
        )
        rows, length = batch.input_ids.shape
        context_positions = torch.arange(length).expand(rows, -1)
        context = self._drafter.context_kv(self._drafter.context_features(batch.taps), context_positions)
        hidden = self._drafter(
            self._drafter.embed(blocks.input_ids, self._head.embedding),  # [b, N * B, H]
            blocks.positions,
            context,
            Visibility(blocks.anchors, config.block_size, length),
        )
        hidden = hidden.view(rows, recipe.train.anchors, config.block_size, -1)  # [b, N, B, H]
        labels = self._head.row_of_id[blocks.labels]
        return block_loss(hidden, labels, blocks.counted, self._head.rows, recipe.loss.gamma)

    def _save(self, *, last: bool) -> None:
        began = time.perf_counter()
        try:
            path, size = save_checkpoint(
                self._checkpoints, self._drafter, self._optimizer, self._position, self._identity
            )
        except RoomError as error:
            # A full disk must not end a week of training: the older checkpoints are there, the next may fit.
            self._writer.write(Alert("error", str(error)))
            if last:
                raise
            return
        self._writer.write(TrainCheckpoint(self._position.step, path.name, size, round(time.perf_counter() - began, 3)))

    def _drop(self, index: int) -> None:
        """Count what was not trained on; a run that drops a fifth of its data ends."""
        self._dropped += 1
        self._writer.write(Alert("warning", f"micro-batch {index} is dropped: values that are not finite"))
        seen = max(10, self._position.step * self._recipe.train.micro_batches_per_step)
        if self._dropped > _MAX_DROPPED_SHARE * seen:
            raise EngineError(
                f"{self._dropped} of {seen} micro-batches had values that are not finite; "
                "look at the target's dtype and the learning rate"
            )
