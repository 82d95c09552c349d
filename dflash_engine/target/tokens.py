"""The target's tokenizer: chats to token ids, and the ids at which the target stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dflash_engine.errors import TargetError
from dflash_engine.target.stop_ids import configured_stop_ids

__all__ = ["TargetTokens", "load_tokens"]


@dataclass(frozen=True)
class TargetTokens:
    """A tokenizer with the two questions that the engine asks of it."""

    tokenizer: Any
    stop_ids: tuple[int, ...]

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
        """Token ids of a conversation by the chat template; text is never tokenised a second time."""
        ids = self.tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False
        )
        return [int(i) for i in ids]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds, special tokens included; together they are the decoded text.

        A token that ends inside a character adds nothing; the one that completes it adds all of it.
        """
        found: list[str] = []
        begin = shown = 0
        for end in range(1, len(ids) + 1):
            text = self.tokenizer.decode(ids[begin:end], clean_up_tokenization_spaces=False)
            whole = not text.endswith("\ufffd") or end == len(ids)
            found.append(text[shown:] if whole else "")
            if whole:
                # What follows is decoded behind this token, because some decoders treat a text's first one apart.
                begin = end - 1
                shown = len(self.tokenizer.decode(ids[begin:end], clean_up_tokenization_spaces=False))
        return found


def load_tokens(folder: Path) -> TargetTokens:
    """The tokenizer of a Hugging Face folder. Raises TargetError where it or its chat template is missing."""
    if not (folder / "config.json").is_file():
        raise TargetError(f"target {folder} is not there; expected a Hugging Face folder with config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TargetError(f"target {folder}: its tokenizer cannot be loaded: {error}") from error
    if not getattr(tokenizer, "chat_template", None):
        raise TargetError(f"target {folder}: its tokenizer has no chat template; chats cannot be rendered")
    return TargetTokens(tokenizer, _stop_ids(folder, tokenizer))


def _stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Every id that the configurations or the tokenizer name."""
    found = set(configured_stop_ids(folder))
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    if not found:
        raise TargetError(f"target {folder} names no stop token (eos_token_id)")
    return tuple(sorted(found))
