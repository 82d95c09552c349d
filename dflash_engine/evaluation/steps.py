"""`dflash-engine evaluate`: the five steps from a target and a checkpoint to an acceptance length.

1 target, 2 drafter checkpoint, 3 greedy references, 4 hidden states, 5 drafter evaluation. Cheap faults are
found in the first two; 3 and 4 are found ready when anybody asked for the same before, and the target is only
loaded when one of them is not. The check of `hidden_norm(fc(taps))` is made as soon as states exist, in step 4.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_engine import durable, manifest
from dflash_engine.drafter.checkpoint import load_drafter
from dflash_engine.drafter.fit import fit_faults
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.errors import CheckpointError, DataError, EngineError, RoomError, TargetError
from dflash_engine.evaluation.acceptance import summarise
from dflash_engine.evaluation.cache import content_key, load_references, load_states, store_references, store_states
from dflash_engine.evaluation.identity import EvaluationSettings, evaluation_id
from dflash_engine.evaluation.prompts import PromptSet, load_prompts
from dflash_engine.evaluation.report import FeatureCheck, PromptRow, build_result
from dflash_engine.evaluation.walk import ReferencePath, walk
from dflash_engine.events import Alert, EvalPrompt, EvalResult, EvalStep, EventWriter, JobStarted
from dflash_engine.fingerprint import model_fingerprint, tokenizer_fingerprint
from dflash_engine.probe import memory_bytes
from dflash_engine.target.capture import capture
from dflash_engine.target.embedding import load_embedding_and_head
from dflash_engine.target.greedy import Completion, greedy_decode
from dflash_engine.target.load import Target, load_target
from dflash_engine.target.tokens import TargetTokens, load_tokens

__all__ = ["EvaluateRequest", "evaluate", "main"]

_PROGRESS_INTERVAL_S = 0.5
_NAMES = ("target", "drafter checkpoint", "greedy references", "hidden states", "drafter evaluation")


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
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    arguments = _parse(argv)
    torch.set_num_threads(arguments.threads or len(os.sched_getaffinity(0)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    job_dir = Path(os.environ.get("DFLASH_JOB_DIR", arguments.out))
    writer = EventWriter(job_dir / "events.jsonl")
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
        print(f"dflash-engine: error: {error}", file=sys.stderr)  # noqa: T201 # the engine's error line
        return error.exit_code
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dflash-engine evaluate", description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for result.json")
    parser.add_argument("--cache", type=Path, help="references and hidden states; default OUT/cache")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--id", default="", help="fail where the evaluation's id is another one")
    return parser.parse_args(argv)


def evaluate(request: EvaluateRequest, writer: EventWriter) -> dict[str, Any]:
    """The five steps; writes `result.json` and returns what it holds. Raises EngineError subclasses."""
    evaluation = _Evaluation(request, writer)
    return evaluation.run()


class _Evaluation:
    """One evaluation's values, each made once."""

    def __init__(self, request: EvaluateRequest, writer: EventWriter) -> None:
        self._request = request
        self._writer = writer
        self._seconds: dict[str, float] = {}
        self._last_progress = 0.0

    def run(self) -> dict[str, Any]:
        request = self._request
        with self._step(1) as done:
            tokens = load_tokens(request.target)
            target_print = model_fingerprint(request.target)
            tokenizer_print = tokenizer_fingerprint(request.target)
            prompts = load_prompts(request.prompts, tokens, limit=request.settings.limit)
            done("done", f"{target_print[:12]}, {len(prompts.prompts)} prompts, {self._memory_plan()}")
        with self._step(2) as done:
            drafter, checkpoint = self._load_drafter(target_print)
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
        )
        with self._step(3) as done:
            completions, how = self._references(reference_key, prompts)
            done(how, f"{sum(len(c.tokens) for c in completions)} tokens")
        with self._step(4) as done:
            paths, how = self._paths(reference_key, prompts, completions, layer_ids)
            features = _check_features(drafter, paths[0])
            done(how, f"fc mean {features.mean:.4f} std {features.std:.4f} on the first prompt")
        with self._step(5) as done:
            embedding, head = load_embedding_and_head(request.target, dtype=torch.float32)
            traces = walk(
                drafter, embedding, head, paths, block_size=block_size, progress=self._progress(5, "tokens")
            )
            rows = [
                PromptRow(prompt.id, len(prompt.tokens), completion.tokens, completion.finish, trace)
                for prompt, completion, trace in zip(prompts.prompts, completions, traces, strict=True)
            ]
            for row in rows:
                _require_lossless(row)
            try:
                acceptance = summarise(traces, block_size)
            except ValueError as error:
                raise DataError(f"{error}; choose other prompts") from error
            done("done", f"tau {acceptance.tau:.3f}")
        self._announce(identity, rows, acceptance.tau, acceptance, checkpoint)
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
            reference={"kind": "local", "key": reference_key},
            acceptance=acceptance,
            features=features,
            rows=rows,
            engine_hash=os.environ.get("DFLASH_ENGINE_HASH", ""),
            seconds=self._seconds,
        )
        durable.write_json(request.out / "result.json", result)
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

    def _load_drafter(self, target_print: str) -> tuple[DFlashDrafter, dict[str, Any]]:
        """The drafter and its identity; refused where it does not hold its manifest or does not fit the target."""
        folder = self._request.drafter
        drafter = load_drafter(folder)
        target_config = json.loads((self._request.target / "config.json").read_bytes())
        faults = fit_faults(drafter.config, target_config)
        if faults:
            raise CheckpointError(f"{folder} does not fit the target: {'; '.join(faults)}")
        try:
            record = manifest.parse_manifest((folder / manifest.MANIFEST_NAME).read_bytes())
        except (OSError, manifest.ManifestError) as error:
            raise CheckpointError(f"{folder}: {error}; stage the checkpoint, which gives it a manifest") from error
        faults = manifest.verify_files(folder, record.model)
        if faults:
            raise CheckpointError(f"{folder} is not what its manifest says: {'; '.join(faults)}")
        if record.target_fingerprint and record.target_fingerprint != target_print:
            self._writer.write(
                Alert(
                    "warning",
                    f"the drafter was trained for target {record.target_fingerprint[:12]}, this one is "
                    f"{target_print[:12]}",
                )
            )
        checkpoint = {
            "fingerprint": record.model_fingerprint(),
            "run": record.run,
            "step": record.step,
            "path": str(folder),
        }
        return drafter, checkpoint

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
            progress=self._progress(3, "tokens"),
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
            ReferencePath(len(prompt.tokens), text, taps)
            for prompt, text, taps in zip(prompts.prompts, texts, states, strict=True)
        ]
        return paths, how

    def _capture(self, texts: list[Tensor], layer_ids: list[int]) -> list[Tensor]:
        progress = self._progress(4, "tokens")
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

    def _announce(self, identity: str, rows: list[PromptRow], tau: float, acceptance: Any, checkpoint: Any) -> None:
        for row in rows:
            mean = row.trace.tau
            self._writer.write(
                EvalPrompt(
                    prompt=row.id,
                    tau=math.nan if mean is None else mean,
                    steps=len(row.trace.steps),
                    tokens=len(row.completion),
                    accepted=row.trace.yields,
                )
            )
        self._writer.write(
            EvalResult(
                evaluation=identity,
                checkpoint=f"{checkpoint['run']}:step_{checkpoint['step']}",
                tau=tau,
                tau_per_prompt=acceptance.tau_per_prompt,
                steps=acceptance.steps,
                prompts=len(rows),
                acceptance_by_position=list(acceptance.acceptance_by_position),
                seconds=round(sum(self._seconds.values()), 3),
            )
        )

    @contextmanager
    def _step(self, n: int) -> Any:
        """Announce a step's start; the body calls the given function with state and detail at its end."""
        began = time.perf_counter()
        self._writer.write(EvalStep(n, _NAMES[n - 1], "started"))
        self._last_progress = time.perf_counter()

        def done(state: str, detail: str) -> None:
            self._seconds[_NAMES[n - 1]] = time.perf_counter() - began
            self._writer.write(
                EvalStep(n, _NAMES[n - 1], state, detail=f"{detail}, {time.perf_counter() - began:.1f} s")
            )

        yield done

    def _progress(self, n: int, unit: str) -> Callable[[int, int], None]:
        began = time.perf_counter()

        def report(done: int, total: int) -> None:
            now = time.perf_counter()
            if now - self._last_progress < _PROGRESS_INTERVAL_S:
                return
            self._last_progress = now
            eta_s = (now - began) * (total - done) / done if done else None
            self._writer.write(EvalStep(n, _NAMES[n - 1], "progress", 5, done, total, unit, eta_s))

        return report


@torch.no_grad()
def _check_features(drafter: DFlashDrafter, path: ReferencePath) -> FeatureCheck:
    features = drafter.context_features(path.taps[None, : path.prompt_length])
    finite = bool(torch.isfinite(features).all())
    if not finite:
        raise CheckpointError("hidden_norm(fc(taps)) is not finite on the first prompt: the drafter cannot be used")
    return FeatureCheck(list(features.shape), float(features.mean()), float(features.std()), finite)


def _require_lossless(row: PromptRow) -> None:
    """The prefill's token and all yields are the whole reference, or the walk is wrong."""
    emitted = 1 + sum(row.trace.yields)
    if emitted != len(row.completion):
        raise EngineError(f"prompt {row.id}: {emitted} tokens were walked, the reference has {len(row.completion)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
