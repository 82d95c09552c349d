"""An evaluation's id: what must be equal for two evaluations to be the same one. Importable without torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

__all__ = ["DEFINITION", "EvaluationSettings", "evaluation_id"]

DEFINITION = "tokens per verification step, bonus included, prefill token excluded, cut at stop and limit"
"""The definition of acceptance length that the results carry; see `evaluation/acceptance.py`."""


@dataclass(frozen=True)
class EvaluationSettings:
    """All that changes the numbers, besides checkpoint, target and prompts."""

    reference: str = "local"
    """Where the greedy references come from: `local`, or a server's or file's identity."""
    max_new_tokens: int = 128
    """Limit of new tokens per prompt, the prefill token included."""
    limit: int = 0
    """Only the first so many prompts of the files together; 0: all."""
    block_size: int = 0
    """Block size of the evaluation; 0: the checkpoint's own."""
    dtype: str = "float32"
    """Arithmetic of the target; the drafter computes in float32."""


def evaluation_id(*, checkpoint: str, target: str, tokenizer: str, prompts: str, settings: EvaluationSettings) -> str:
    """Hash of everything an evaluation depends on, 64 hexadecimal digits.

    `checkpoint` is `Manifest.model_fingerprint()`, `target` and `tokenizer` are fingerprints
    (`dflash_engine.fingerprint`), `prompts` is the SHA-256 of the prompt files' bytes one after the other.
    """
    document = {
        "checkpoint": checkpoint,
        "target": target,
        "tokenizer": tokenizer,
        "prompts": prompts,
        "settings": asdict(settings),
        "definition": DEFINITION,
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
