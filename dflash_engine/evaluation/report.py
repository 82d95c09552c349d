"""`result.json`: what an evaluation found, and everything it depends on. Schema version 1.

| key | what |
|---|---|
| `v`, `id`, `definition` | schema version, evaluation id, definition of acceptance length in words |
| `checkpoint` | `fingerprint`, `run`, `step`, `path`, `block_size`, `target_layer_ids` |
| `target` | `fingerprint`, `tokenizer_fingerprint`, `path` |
| `settings` | every setting that is part of the id |
| `prompts_sha256` | over the prompt files' bytes one after the other |
| `reference` | `kind` (`local`), `key` (content key of the stored references), `repeatability` in words |
| `tau`, `tau_per_prompt` | pooled over steps; mean of the prompts' means |
| `steps`, `tokens`, `histogram`, `acceptance_by_position` | see `acceptance.Acceptance` |
| `features` | mean, std, finite of `hidden_norm(fc(taps))` on the first prompt |
| `prompts` | one row a prompt: `id`, `tau` (null without a step), `accepted` (tokens each step yielded) |
| | and `matched` (drafted tokens each step accepted), `prompt_tokens`, `completion` (token ids), |
| | `pieces` (the text that each of these adds), `finish` (`stop` or `length`) |
| `engine_hash`, `versions`, `threads`, `seconds` | who computed it, and how long each step took |
"""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

from dflash_engine.evaluation.acceptance import Acceptance, PromptTrace
from dflash_engine.evaluation.identity import DEFINITION, EvaluationSettings

__all__ = ["FeatureCheck", "PromptRow", "build_result"]

RESULT_VERSION = 1


@dataclass(frozen=True)
class FeatureCheck:
    """`hidden_norm(fc(taps))` of the first prompt: the cheap sign that drafter and target belong together."""

    shape: list[int]
    mean: float
    std: float
    finite: bool


@dataclass(frozen=True)
class PromptRow:
    """One prompt with its reference and what the drafter made of it."""

    id: str
    prompt_tokens: int
    completion: tuple[int, ...]
    pieces: tuple[str, ...]
    finish: str
    trace: PromptTrace

    def to_json(self) -> dict[str, Any]:
        """The row as stored."""
        return {
            "id": self.id,
            "tau": self.trace.tau,
            "accepted": self.trace.yields,
            "matched": [step.matched for step in self.trace.steps],
            "prompt_tokens": self.prompt_tokens,
            "completion": list(self.completion),
            "pieces": list(self.pieces),
            "finish": self.finish,
        }


def build_result(
    *,
    evaluation: str,
    checkpoint: dict[str, Any],
    target: dict[str, Any],
    settings: EvaluationSettings,
    prompts_sha256: str,
    reference: dict[str, Any],
    acceptance: Acceptance,
    features: FeatureCheck,
    rows: list[PromptRow],
    engine_hash: str,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The document described above."""
    return {
        "v": RESULT_VERSION,
        "id": evaluation,
        "definition": DEFINITION,
        "checkpoint": checkpoint,
        "target": target,
        "settings": asdict(settings),
        "prompts_sha256": prompts_sha256,
        "reference": reference,
        **asdict(acceptance),
        "features": asdict(features),
        "prompts": [row.to_json() for row in rows],
        "engine_hash": engine_hash,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "threads": torch.get_num_threads(),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }
