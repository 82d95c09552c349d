"""`dflash-engine evaluate`: the five steps from a target and a checkpoint to an acceptance length.

1 target, 2 drafter checkpoint, 3 greedy references, 4 hidden states, 5 drafter evaluation. Cheap faults are
found in the first two; 3 and 4 are found ready when anybody asked for the same before, and the target is only
loaded when one of them is not. The check of `hidden_norm(fc(taps))` is made as soon as states exist, in step 4.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from dflash_engine import durable
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.errors import CheckpointError, DataError, EngineError, RoomError, TargetError
from dflash_engine.evaluation.acceptance import summarise
from dflash_engine.evaluation.cache import content_key, load_references, load_states, store_references, store_states
from dflash_engine.evaluation.checkpoint import open_checkpoint
from dflash_engine.evaluation.identity import EvaluationSettings, evaluation_id
from dflash_engine.evaluation.progress import StepEvents
from dflash_engine.evaluation.prompts import PromptSet, load_prompts
from dflash_engine.evaluation.report import FeatureCheck, PromptRow, build_result
from dflash_engine.evaluation.walk import ReferencePath, walk
from dflash_engine.events import Alert, EventWriter, JobStarted
from dflash_engine.fingerprint import model_fingerprint, tokenizer_fingerprint
from dflash_engine.probe import memory_bytes
from dflash_engine.target.capture import capture
from dflash_engine.target.embedding import load_embedding_and_head
from dflash_engine.target.greedy import Completion, greedy_decode
from dflash_engine.target.load import Target, load_target
from dflash_engine.target.tokens import load_tokens

__all__ = ["EvaluateRequest", "evaluate", "main"]


@dataclass(frozen=True)
class EvaluateRequest:
    """What to evaluate on what; `settings` are what the id covers besides."""

    target: Path
    drafter: Path
    prompts: tuple[Path, ...]
    out: Path
    cache: Path
    settings: EvaluationSettings = field(default_factory=EvaluationSettings)
    expected_id: str = ""
    """The id that the console computed; a difference is an error, because it reports under that id."""


def main(argv: list[str]) -> int:
    """Run an evaluation from the command line; returns the exit code of the error's class."""
    torch.set_flush_denormal(True)  # before the first thread
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would compete with torch's
    arguments = _parse(argv)
    torch.set_num_threads(arguments.threads or len(os.sched_getaffinity(0)))
    job_dir = Path(os.environ.get("DFLASH_JOB_DIR", arguments.out))
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        writer = EventWriter(job_dir / "events.jsonl")
    except OSError as error:
        return _fail(RoomError(f"{error.filename} cannot be written: {error.strerror}; name a folder that can be"))
    writer.write(JobStarted(os.environ.get("DFLASH_JOB_ID", job_dir.name), "evaluate"))
    request = EvaluateRequest(
        target=arguments.target,
        drafter=arguments.drafter,
        prompts=tuple(arguments.prompts),
        out=arguments.out,
        cache=arguments.cache or arguments.out / "cache",
        settings=EvaluationSettings(
            max_new_tokens=arguments.max_new_tokens,
            limit=arguments.limit,
            block_size=arguments.block_size,
            dtype=arguments.dtype,
        ),
        expected_id=arguments.id,
    )
    try:
        evaluate(request, writer)
    except EngineError as error:
        writer.write(Alert("error", str(error)))
        return _fail(error)
    return 0


def _fail(error: EngineError) -> int:
    sys.stderr.write(f"dflash-engine: error: {error}\n")
    return error.exit_code


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dflash-engine evaluate", description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for result.json")
    parser.add_argument("--cache", type=Path, help="references and hidden states; default OUT/cache")
    parser.add_argument("--max-new-tokens", type=_at_least(1), default=128)
    parser.add_argument("--limit", type=_at_least(0), default=0)
    parser.add_argument("--block-size", type=_at_least(0), default=0)
    parser.add_argument("--threads", type=_at_least(0), default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--id", default="", help="fail where the evaluation's id is another one")
    return parser.parse_args(argv)


def _at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return count


def evaluate(request: EvaluateRequest, writer: EventWriter) -> dict[str, Any]:
    """The five steps; writes `result.json` and returns what it holds. Raises EngineError subclasses."""
    evaluation = _Evaluation(request, writer)
    return evaluation.run()


class _Evaluation:
    """One evaluation's values, each made once."""

    def __init__(self, request: EvaluateRequest, writer: EventWriter) -> None:
        self._request = request
        self._writer = writer
        self._events = StepEvents(writer)

    def run(self) -> dict[str, Any]:
        request = self._request
        with self._events.step(1) as done:
            tokens = load_tokens(request.target)
            target_print = model_fingerprint(request.target)
            tokenizer_print = tokenizer_fingerprint(request.target)
            prompts = load_prompts(request.prompts, tokens, limit=request.settings.limit)
            done("done", f"{target_print[:12]}, {len(prompts.prompts)} prompts, {self._memory_plan()}")
        with self._events.step(2) as done:
            drafter, checkpoint = self._open_checkpoint(target_print)
            block_size = request.settings.block_size or drafter.config.block_size
            if not 2 <= block_size <= drafter.config.block_size:
                raise CheckpointError(
                    f"block size {block_size} was asked for, the drafter was trained with {drafter.config.block_size}; "
                    "expected 2 to that"
                )
            identity = self._identity(checkpoint["fingerprint"], target_print, tokenizer_print, prompts)
            layer_ids = list(drafter.config.target_layer_ids)
            done("done", f"{request.drafter.name}, block {block_size}, taps {layer_ids}")
        reference_key = content_key(
            kind="local",
            target=target_print,
            tokenizer=tokenizer_print,
            prompts=[prompt.tokens for prompt in prompts.prompts],
            stop_ids=tokens.stop_ids,
            max_new_tokens=request.settings.max_new_tokens,
            dtype=request.settings.dtype,
            versions=[torch.__version__, transformers.__version__],
        )
        with self._events.step(3) as done:
            completions, how = self._references(reference_key, prompts)
            done(how, f"{sum(len(c.tokens) for c in completions)} tokens")
        with self._events.step(4) as done:
            paths, how = self._paths(reference_key, prompts, completions, layer_ids)
            features = _check_features(drafter, paths[0])
            done(how, f"fc mean {features.mean:.4f} std {features.std:.4f} on the first prompt")
        with self._events.step(5) as done:
            embedding, head = load_embedding_and_head(request.target, dtype=torch.float32)
            traces = walk(
                drafter, embedding, head, paths, block_size=block_size, progress=self._events.progress(5, "tokens")
            )
            rows = [
                PromptRow(
                    id=prompt.id,
                    prompt_tokens=len(prompt.tokens),
                    completion=completion.tokens,
                    pieces=tuple(tokens.pieces(completion.tokens)),
                    finish=completion.finish,
                    trace=trace,
                )
                for prompt, completion, trace in zip(prompts.prompts, completions, traces, strict=True)
            ]
            for row in rows:
                _require_lossless(row)
            try:
                acceptance = summarise(traces, block_size)
            except ValueError as error:
                raise DataError(f"{error}; choose other prompts") from error
            done("done", f"tau {acceptance.tau:.3f}")
        result = build_result(
            evaluation=identity,
            checkpoint={**checkpoint, "block_size": block_size, "target_layer_ids": layer_ids},
            target={
                "fingerprint": target_print,
                "tokenizer_fingerprint": tokenizer_print,
                "path": str(request.target),
            },
            settings=request.settings,
            prompts_sha256=prompts.sha256,
            reference={"kind": "local", "key": reference_key, "repeatability": _repeatability(request.settings.dtype)},
            acceptance=acceptance,
            features=features,
            rows=rows,
            engine_hash=os.environ.get("DFLASH_ENGINE_HASH", ""),
            seconds=self._events.seconds,
        )
        try:
            durable.write_json(request.out / "result.json", result)
        except OSError as error:
            raise RoomError(f"{request.out / 'result.json'} could not be written: {error.strerror}") from error
        self._events.result(identity, f"{checkpoint['run']}:step_{checkpoint['step']}", rows, acceptance)
        return result

    @cached_property
    def _dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self._request.settings.dtype]

    @cached_property
    def _target(self) -> Target:
        return load_target(self._request.target, dtype=self._dtype)

    def _memory_plan(self) -> str:
        """How much the target needs whole; raises RoomError before it is tried."""
        weights = sum(path.stat().st_size for path in self._request.target.glob("*.safetensors"))
        needed = int(weights * 1.2) + (1 << 29)
        available = memory_bytes()["MemAvailable"]
        if needed > available:
            raise RoomError(
                f"the target needs about {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are available"
            )
        return f"about {needed / 2**30:.1f} of {available / 2**30:.1f} GiB memory"

    def _open_checkpoint(self, target_print: str) -> tuple[DFlashDrafter, dict[str, Any]]:
        folder = self._request.drafter
        drafter, record = open_checkpoint(folder, self._request.target)
        if record.target_fingerprint and record.target_fingerprint != target_print:
            made_for = record.target_fingerprint[:12]
            message = f"the drafter was trained for target {made_for}, this one is {target_print[:12]}"
            self._writer.write(Alert("warning", message))
        return drafter, {
            "fingerprint": record.model_fingerprint(),
            "run": record.run,
            "step": record.step,
            "path": str(folder),
        }

    def _identity(self, checkpoint: str, target: str, tokenizer: str, prompts: PromptSet) -> str:
        identity = evaluation_id(
            checkpoint=checkpoint,
            target=target,
            tokenizer=tokenizer,
            prompts=prompts.sha256,
            settings=self._request.settings,
        )
        expected = self._request.expected_id
        if expected and expected != identity:
            raise CheckpointError(
                f"this is evaluation {identity[:16]}, {expected[:16]} was asked for: the checkpoint, target or prompts "
                "changed since; ask again"
            )
        return identity

    def _references(self, key: str, prompts: PromptSet) -> tuple[list[Completion], str]:
        found = load_references(self._request.cache, key)
        if found is not None and len(found) == len(prompts.prompts):
            return found, "cached"
        completions = greedy_decode(
            self._target,
            [prompt.tokens for prompt in prompts.prompts],
            max_new_tokens=self._request.settings.max_new_tokens,
            progress=self._events.progress(3, "tokens"),
        )
        store_references(self._request.cache, key, completions)
        return completions, "done"

    def _paths(
        self, reference_key: str, prompts: PromptSet, completions: list[Completion], layer_ids: list[int]
    ) -> tuple[list[ReferencePath], str]:
        texts = [
            torch.tensor(prompt.tokens + completion.tokens)
            for prompt, completion in zip(prompts.prompts, completions, strict=True)
        ]
        key = content_key(reference=reference_key, layer_ids=layer_ids)
        states = load_states(self._request.cache, key, [len(text) for text in texts])
        how = "cached"
        if states is None:
            states, how = self._capture(texts, layer_ids), "done"
            store_states(self._request.cache, key, states)
        paths = [
            ReferencePath(len(prompt.tokens), text, taps, self._request.settings.max_new_tokens)
            for prompt, text, taps in zip(prompts.prompts, texts, states, strict=True)
        ]
        return paths, how

    def _capture(self, texts: list[Tensor], layer_ids: list[int]) -> list[Tensor]:
        progress = self._events.progress(4, "tokens")
        total = sum(len(text) for text in texts)
        done = 0
        states = []
        for text in texts:
            # One at a time: on a CPU a padded token costs as much as a real one.
            taps = capture(self._target, text[None], torch.tensor([len(text)]), layer_ids)[0].float()
            if not bool(torch.isfinite(taps).all()):
                raise TargetError("the target's hidden states are not finite; its weights are damaged")
            states.append(taps)
            done += len(text)
            progress(done, total)
        return states


def _repeatability(dtype: str) -> str:
    """What a person should know before they compare with references made elsewhere."""
    if dtype == "float32":
        return "float32: the same tokens whatever the batch, except where two logits are within rounding"
    return f"{dtype}: another batch, thread count or torch may change tokens where two logits are close"


@torch.no_grad()
def _check_features(drafter: DFlashDrafter, path: ReferencePath) -> FeatureCheck:
    features = drafter.context_features(path.taps[None, : path.prompt_length])
    finite = bool(torch.isfinite(features).all())
    if not finite:
        raise CheckpointError("hidden_norm(fc(taps)) is not finite on the first prompt: the drafter cannot be used")
    return FeatureCheck(list(features.shape), float(features.mean()), float(features.std()), finite)


def _require_lossless(row: PromptRow) -> None:
    """Prefill token, accepted drafts and bonuses are the reference, token for token, or a draft went unverified."""
    walked = row.completion[:1] + tuple(token for step in row.trace.steps for token in step.tokens)
    if walked == row.completion:
        return
    same = next(
        (i for i, (ours, theirs) in enumerate(zip(walked, row.completion, strict=False)) if ours != theirs),
        min(len(walked), len(row.completion)),
    )
    raise EngineError(
        f"prompt {row.id}: the walk's {len(walked)} tokens differ from the reference's {len(row.completion)} at "
        f"token {same}; its acceptance length means nothing. Please report this"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
