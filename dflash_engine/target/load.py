"""The frozen target, whole, in memory: for capture and for greedy references."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from dflash_engine.errors import TargetError
from dflash_engine.target.tokens import TargetTokens, load_tokens

__all__ = ["Target", "load_target"]


@dataclass(frozen=True)
class Target:
    """A Hugging Face causal language model in evaluation mode, its gradients off, with its tokens."""

    folder: Path
    model: Any
    tokens: TargetTokens

    @property
    def config(self) -> Any:
        """The text model's configuration."""
        return self.model.config.get_text_config()

    @property
    def num_layers(self) -> int:
        """Number of blocks; layer ids are 0-based outputs of them."""
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""
        return int(self.config.hidden_size)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids at which the target stops."""
        return self.tokens.stop_ids

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's blocks in order."""
        layers: nn.ModuleList = self.model.get_decoder().layers
        return layers

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] int64 -> embeddings [..., H]."""
        embedded: Tensor = self.model.get_input_embeddings()(ids)
        return embedded

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states after a final norm [..., H] -> logits [..., V]."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states after a final norm [..., H] -> (largest logit [...], its id [...]), the lowest of equal ones.

        What a configuration does to logits afterwards (soft cap, scale) keeps their order and is left out.
        """
        head = self.model.get_output_embeddings()
        # Weights times states: with few rows on a CPU almost twice as fast as `head(hidden)`.
        logits = head.weight @ hidden.reshape(-1, hidden.shape[-1]).T  # [V, rows]
        if head.bias is not None:
            logits += head.bias[:, None]
        best, ids = logits.max(dim=0)
        return best.view(hidden.shape[:-1]), ids.view(hidden.shape[:-1])


def load_target(folder: Path, *, dtype: torch.dtype) -> Target:
    """Load a Hugging Face folder on the CPU. Raises TargetError naming the folder and what is wrong.

    No code of the folder's runs (`trust_remote_code` stays off), nothing is fetched.
    """
    tokens = load_tokens(folder)
    transformers_logging.disable_progress_bar()  # a bar in a log file is noise
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, attn_implementation="sdpa", use_safetensors=True
        )
    except Exception as error:  # transformers raises anything for a damaged folder
        raise TargetError(f"target {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    model.eval().requires_grad_(False)
    return Target(folder, model, tokens)
