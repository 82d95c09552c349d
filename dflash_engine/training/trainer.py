"""The training process that torchrun starts once per rank: `dflash-engine train RECIPE --target DIR --run-dir DIR`.

Ranks 0..T-1 hold the frozen target, the next ones the drafter. They meet once, over gloo, to exchange errors,
process identities and the ring's name; then the ring is unlinked (a crash leaves nothing in shared memory)
and the only thing between them is memory.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflash_engine import durable
from dflash_engine.data.batches import BatchOrder, derived_seed
from dflash_engine.data.chats import ChatSet, load_chats
from dflash_engine.drafter.config import DrafterConfig
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.errors import EngineError, RecipeError
from dflash_engine.events import Alert, EventWriter, JobStarted, TrainPlan
from dflash_engine.fingerprint import model_fingerprint, tokenizer_fingerprint
from dflash_engine.processes import ProcessIdentity, die_with_parent, process_identity
from dflash_engine.target.embedding import load_embedding_and_head
from dflash_engine.target.tokens import TargetTokens, load_tokens
from dflash_engine.training.checkpoints import Position, RunIdentity, newest_whole, restore
from dflash_engine.training.drafter_rank import DrafterTraining, FrozenHead
from dflash_engine.training.optimizer import DrafterOptimizer
from dflash_engine.training.recipe import Recipe, load_recipe
from dflash_engine.training.ring import Ring, RingShape
from dflash_engine.training.target_rank import StatesCache, TargetWork, bucket_length, run_target_rank

__all__ = ["main"]


@dataclass(frozen=True)
class _Job:
    """What the command line and the environment say."""

    recipe: Recipe
    target: Path
    data: tuple[Path, ...]
    run: Path
    job_dir: Path
    rank: int


@dataclass(frozen=True)
class _Meeting:
    """What one rank tells all others at the start."""

    rank: int
    identity: ProcessIdentity
    fault: str = ""
    ring: str = ""
    first: int = 0


def main(argv: list[str]) -> int:
    """Run this rank to its end; returns the exit code. Needs torchrun's environment."""
    torch.set_flush_denormal(True)  # before the first thread: one denormal-ridden run fell to a tenth of its speed
    die_with_parent()
    arguments = _parse(argv)
    rank = int(os.environ.get("RANK", "-1"))
    try:
        if rank < 0:
            raise RecipeError(
                "train is started by torchrun: torchrun --nproc-per-node N -m dflash_engine.cli train ..."
            )
        job = _job_of(arguments, rank)
    except EngineError as error:
        return _report(error, None)
    torch.set_num_threads(job.recipe.pipeline.threads or os.cpu_count() or 1)
    dist.init_process_group("gloo")
    if rank < job.recipe.pipeline.target_ranks:
        return _target_main(job)
    return _drafter_main(job)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dflash-engine train", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder of the frozen target")
    parser.add_argument(
        "--run-dir", dest="run", type=Path, required=True, help="the run's folder; resumed where it has checkpoints"
    )
    parser.add_argument("--data", type=Path, nargs="+", help="chats to train on instead of the recipe's")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="override the recipe")
    parser.add_argument("--job", type=Path, help="job folder for events and control; default $DFLASH_JOB_DIR")
    return parser.parse_args(argv)


def _job_of(arguments: argparse.Namespace, rank: int) -> _Job:
    recipe = load_recipe(arguments.recipe, arguments.set)
    data = arguments.data or [arguments.recipe.parent / name for name in recipe.data.files]
    job_dir = arguments.job or Path(os.environ.get("DFLASH_JOB_DIR", arguments.run))
    wanted, found = (
        recipe.pipeline.target_ranks + recipe.pipeline.drafter_ranks,
        int(os.environ["WORLD_SIZE"]),
    )
    if wanted != found:
        raise RecipeError(f"the recipe needs {wanted} ranks, torchrun started {found}; use --nproc-per-node {wanted}")
    return _Job(recipe, arguments.target, tuple(data), arguments.run, job_dir, rank)


def _target_main(job: _Job) -> int:
    from dflash_engine.target.capture import capture
    from dflash_engine.target.load import load_target

    fault = ""
    try:
        chats = _load_chats(job, load_tokens(job.target))
        target = load_target(job.target, dtype=torch.float32)
    except EngineError as error:
        fault = str(error)
    meetings = _meet(_Meeting(job.rank, _self_identity(), fault))
    drafter = meetings[job.recipe.pipeline.target_ranks]
    if any(meeting.fault for meeting in meetings):
        dist.barrier()  # torchrun ends all ranks once one has left; the drafter rank reports first
        return EngineError.exit_code
    order = BatchOrder(len(chats.documents), job.recipe.train.rows, job.recipe.train.seed)
    ring = Ring(Path(drafter.ring), _ring_shape(job.recipe, target.hidden_size))
    _close_meeting(None)
    layer_ids = job.recipe.drafter.target_layer_ids
    work = TargetWork(
        rank=job.rank,
        target_ranks=job.recipe.pipeline.target_ranks,
        first=drafter.first,
        end=job.recipe.train.steps * job.recipe.train.micro_batches_per_step,
    )
    cache = StatesCache(job.recipe.pipeline.states_cache_mib << 20)
    try:
        run_target_rank(
            work,
            chats.documents,
            order,
            lambda ids, length: capture(target, ids, torch.tensor([length]), layer_ids).float(),
            cache,
            ring,
            drafter.identity,
        )
    except Exception as error:
        ring.fail(f"{type(error).__name__}: {error}")
        raise
    return 0


def _drafter_main(job: _Job) -> int:
    job.job_dir.mkdir(parents=True, exist_ok=True)
    writer = EventWriter(job.job_dir / "events.jsonl")
    try:
        training, ring_path, shape, position = _prepare_drafter(job, writer)
        first = position.step * job.recipe.train.micro_batches_per_step
        ring = Ring(ring_path, shape, create=True, first=first)
    except EngineError as error:
        _meet(_Meeting(job.rank, _self_identity(), str(error)))
        code = _report(error, writer)
        dist.barrier()
        return code
    meetings = _meet(_Meeting(job.rank, _self_identity(), ring=str(ring_path), first=first))
    faults = [f"target rank {meeting.rank}: {meeting.fault}" for meeting in meetings if meeting.fault]
    if faults:
        ring_path.unlink()
        code = _report(EngineError("; ".join(faults)), writer)
        dist.barrier()
        return code
    _close_meeting(ring_path)
    targets = {meeting.rank: meeting.identity for meeting in meetings[: job.recipe.pipeline.target_ranks]}
    try:
        training.run(ring, targets)
    except EngineError as error:
        return _report(error, writer)
    return 0


def _prepare_drafter(job: _Job, writer: EventWriter) -> tuple[DrafterTraining, Path, RingShape, Position]:
    recipe = job.recipe
    checkpoints = job.run / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    tokens = load_tokens(job.target)
    target_config = json.loads((job.target / "config.json").read_bytes())
    target_config = target_config.get("text_config", target_config)
    drafter = DFlashDrafter(_drafter_config(recipe, target_config, tokens))
    drafter.initialise(torch.Generator().manual_seed(derived_seed(recipe.train.seed, "weights")))
    optimizer = DrafterOptimizer(drafter, recipe.optimizer, recipe.train.steps)
    embedding, head = load_embedding_and_head(job.target, dtype=torch.float32)
    chats = _load_chats(job, tokens)
    identity = RunIdentity(
        run=job.run.name,
        engine_hash=os.environ.get("DFLASH_ENGINE_HASH", ""),
        target_fingerprint=model_fingerprint(job.target),
        tokenizer_fingerprint=tokenizer_fingerprint(job.target),
        recipe=recipe.to_json(),
        data_sha256=chats.sha256,
    )
    newest, passed_over = newest_whole(checkpoints)
    position = restore(newest, drafter, optimizer, identity) if newest else Position()
    job_id = os.environ.get("DFLASH_JOB_ID", job.job_dir.name)
    writer.write(JobStarted(job_id, "train", job.run.name, position.step, identity.engine_hash))
    for sentence in passed_over:
        writer.write(Alert("warning", sentence))
    for reason, count in sorted(chats.skipped.items()):
        writer.write(Alert("warning", f"{count} chats are left out: {reason}"))
    _record_run(job, identity, job_id)
    order = BatchOrder(len(chats.documents), recipe.train.rows, recipe.train.seed)
    writer.write(_plan(recipe, drafter, chats))
    control = job.job_dir / "control"
    control.mkdir(exist_ok=True)
    drafter.train()
    training = DrafterTraining(
        recipe=recipe,
        drafter=drafter,
        optimizer=optimizer,
        head=FrozenHead.of(embedding, head, chats.label_ids() if recipe.loss.vocabulary == "data" else None),
        order=order,
        identity=identity,
        checkpoints=checkpoints,
        control=control,
        writer=writer,
        position=position,
    )
    ring_path = Path("/dev/shm") / f"dflash-{os.getpid()}-{secrets.token_hex(6)}"  # noqa: S108 # 0600, O_EXCL, unlinked at once
    return training, ring_path, _ring_shape(recipe, drafter.config.target_hidden_size), position


def _drafter_config(recipe: Recipe, target: dict[str, Any], tokens: TargetTokens) -> DrafterConfig:
    """The drafter's shape field by field: nothing of the target's configuration is copied whole."""
    wanted = recipe.drafter
    rope = target.get("rope_parameters") or {}
    heads = wanted.attention_heads or target["num_attention_heads"]
    hidden_size = wanted.hidden_size or target["hidden_size"]
    if hidden_size != target["hidden_size"]:
        raise RecipeError(f"'drafter.hidden_size' is {hidden_size}, the target's embedding has {target['hidden_size']}")
    if wanted.mask_token_id in tokens.stop_ids:
        raise RecipeError(f"'drafter.mask_token_id' {wanted.mask_token_id} is a stop token of the target")
    last = target["num_hidden_layers"] - 1
    if max(wanted.target_layer_ids) >= last or min(wanted.target_layer_ids) < 0:
        raise RecipeError(
            f"'drafter.target_layer_ids' {list(wanted.target_layer_ids)}: expected 0..{last - 1}; "
            f"the last layer ({last}) cannot be tapped"
        )
    return DrafterConfig(
        hidden_size=hidden_size,
        intermediate_size=wanted.intermediate_size or target["intermediate_size"],
        num_hidden_layers=wanted.layers,
        num_attention_heads=heads,
        num_key_value_heads=wanted.key_value_heads or target.get("num_key_value_heads", heads),
        head_dim=wanted.head_dim or target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"],
        rms_norm_eps=float(target["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", target.get("rope_theta", 10_000.0))),
        max_position_embeddings=target["max_position_embeddings"],
        vocab_size=target["vocab_size"],
        block_size=wanted.block_size,
        mask_token_id=wanted.mask_token_id,
        target_layer_ids=wanted.target_layer_ids,
        num_target_layers=target["num_hidden_layers"],
        target_hidden_size=target["hidden_size"],
    )


def _record_run(job: _Job, identity: RunIdentity, job_id: str) -> None:
    """`run.json`: what the run is and its jobs in order."""
    path = job.run / "run.json"
    known = json.loads(path.read_bytes()) if path.exists() else {}
    document = {
        "v": 1,
        "id": identity.run,
        "created": known.get("created", time.time()),
        "target": str(job.target),
        "target_fingerprint": identity.target_fingerprint,
        "tokenizer_fingerprint": identity.tokenizer_fingerprint,
        "data_sha256": identity.data_sha256,
        "recipe": identity.recipe,
        "jobs": [*(other for other in known.get("jobs", []) if other != job_id), job_id],
        "forked_from": known.get("forked_from"),
    }
    durable.write_json(path, document)


def _plan(recipe: Recipe, drafter: DFlashDrafter, chats: ChatSet) -> TrainPlan:
    tokens = sum(len(document.tokens) for document in chats.documents)
    per_step = recipe.train.rows * recipe.train.micro_batches_per_step
    return TrainPlan(
        steps=recipe.train.steps,
        tokens_per_step=round(tokens / len(chats.documents) * per_step),
        target_ranks=recipe.pipeline.target_ranks,
        drafter_ranks=recipe.pipeline.drafter_ranks,
        ring_slots=recipe.pipeline.ring_slots,
        micro_batches_per_step=recipe.train.micro_batches_per_step,
        checkpoint_every=recipe.train.checkpoint_every,
        parameters=sum(parameter.numel() for parameter in drafter.parameters()),
        block_size=drafter.config.block_size,
        target_layer_ids=list(drafter.config.target_layer_ids),
        detail=f"{len(chats.documents)} chats, {tokens} tokens, {torch.get_num_threads()} threads a rank",
    )


def _load_chats(job: _Job, tokens: TargetTokens) -> ChatSet:
    return load_chats(job.data, tokens.render, tokens.stop_ids, max_length=job.recipe.data.max_length)


def _ring_shape(recipe: Recipe, hidden_size: int) -> RingShape:
    return RingShape(
        slots=recipe.pipeline.ring_slots,
        rows=recipe.train.rows,
        max_length=bucket_length(recipe.data.max_length),
        features=len(recipe.drafter.target_layer_ids) * hidden_size,
    )


def _self_identity() -> ProcessIdentity:
    identity = process_identity(os.getpid())
    assert identity is not None  # noqa: S101 # this process runs, so /proc has it
    return identity


def _meet(mine: _Meeting) -> list[_Meeting]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _close_meeting(ring_path: Path | None) -> None:
    """The last collective that target ranks join: once all have opened the ring, its name can go."""
    dist.barrier()
    if ring_path is not None:
        ring_path.unlink()
    dist.destroy_process_group()


def _report(error: EngineError, writer: EventWriter | None) -> int:
    if writer is not None:
        writer.write(Alert("error", str(error)))
    print(f"dflash-engine: error: {error}", file=sys.stderr, flush=True)  # noqa: T201 # the engine's error line
    return error.exit_code
