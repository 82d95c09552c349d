"""Tiny targets and drafters, made in well under a second: real folders, real tokenizer, random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash_engine.drafter.checkpoint import save_drafter
from dflash_engine.drafter.config import DrafterConfig
from dflash_engine.drafter.model import DFlashDrafter

VOCAB_SIZE = 512
START, END, MASK = 256, 257, 258
"""Ids of <|im_start|>, <|im_end|> (the stop token) and <|mask|>; 0-255 are bytes, the rest pairs of letters."""

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ChatML and exactly VOCAB_SIZE ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinshrdlcumwf"
    pairs = [(a, b) for a in letters for b in letters][: VOCAB_SIZE - len(alphabet) - 3]
    specials = ["<|im_start|>", "<|im_end|>", "<|mask|>"]
    tokens = [*alphabet, *specials, *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = _CHATML
    return fast


def make_target(
    folder: Path,
    kind: Literal["qwen3", "llama"] = "qwen3",
    *,
    seed: int = 0,
    layers: int = 6,
    hidden_size: int = 64,
    stop_ids: int | list[int] = END,
    shard_bytes: int | None = None,
) -> Path:
    """A random target folder; `shard_bytes` cuts its weights into several files."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": 1024,
        "eos_token_id": stop_ids,
        "bos_token_id": START,
        "pad_token_id": None,
        # Random targets of the usual 0.02 repeat one token; at this scale their text varies.
        "initializer_range": 0.15,
    }
    torch.manual_seed(seed)
    model = (
        Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=False, **sizes))
        if kind == "qwen3"
        else LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **sizes))
    )
    shards = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.float().save_pretrained(folder, **shards)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_drafter(
    folder: Path, *, seed: int = 0, block_size: int = 4, layer_ids: tuple[int, ...] = (1, 3), **changes: Any
) -> Path:
    """A random drafter checkpoint (the `model` set) for `make_target`'s default target."""
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 1024,
        "vocab_size": VOCAB_SIZE,
        "block_size": block_size,
        "mask_token_id": MASK,
        "target_layer_ids": layer_ids,
        "num_target_layers": 6,
        "target_hidden_size": 64,
    }
    drafter = DFlashDrafter(DrafterConfig(**(fields | changes)))
    drafter.initialise(torch.Generator().manual_seed(seed), std=0.15)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                # As after training: a drafter whose norms are all exactly one is warned about.
                parameter.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    folder.mkdir(parents=True)
    save_drafter(drafter, folder)
    return folder
