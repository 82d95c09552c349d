"""What can be wrong with a checkpoint, each with a code that does not change. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CODES", "Fault"]

CODES = {
    "file_missing": "a file of the checkpoint is not there",
    "file_damaged": "a file cannot be read or does not account for its bytes",
    "pickle_unsafe": "a torch.save file holds more than tensors and plain values",
    "layout_unknown": "the folder is in none of the layouts that are read",
    "architecture_unknown": "a drafter of an architecture that this engine does not run",
    "config_missing": "a key that is needed is not in the configuration",
    "config_value": "a key has a value that cannot be",
    "layer_ids_missing": "the tapped target layers are not named (they are never guessed)",
    "layer_ids_empty": "the list of tapped target layers is empty",
    "layer_id_out_of_range": "a tapped layer does not exist in the target",
    "layer_id_last": "the target's last layer is tapped, whose state is ambiguous",
    "layer_ids_duplicate": "a target layer is tapped twice",
    "layer_ids_unsorted": "the tapped layers are not in ascending order",
    "block_size_missing": "no block size is given",
    "block_size_conflict": "the two places of the block size disagree",
    "mask_id_outside_vocab": "the mask token has no row in the embedding",
    "mask_id_is_stop": "the mask token is a stop or padding token of the target",
    "rope_conflict": "the two RoPE schemas of the configuration disagree",
    "rope_unknown": "a kind of RoPE that this engine does not have",
    "rope_unlike_target": "RoPE base or scaling differ from the target's",
    "window_missing": "there are sliding layers and no window",
    "window_nulled": "use_sliding_window is off, so readers set the window to null",
    "layer_types_count": "there are not as many layer types as layers",
    "layer_type_unknown": "a layer type that this engine does not have",
    "missing_tensor": "a tensor of the architecture is absent",
    "extra_tensor": "a tensor belongs to no module of the architecture",
    "wrong_shape": "a tensor has another shape than the configuration implies",
    "wrong_fc_width": "fc does not take as many features as layers are tapped",
    "layer_count_mismatch": "the weights hold another number of layers than the configuration says",
    "wrong_dtype": "a tensor has a dtype that no drafter has",
    "dtype_mismatch": "the configuration names another dtype than the tensors have",
    "not_finite": "a tensor holds NaN or Inf",
    "frozen_norms": "every norm weight is exactly one after training (bf16 weights that never moved)",
    "vocab_map": "the draft vocabulary's id map is not one",
    "target_layers": "made for a target with another number of layers",
    "target_width": "made for a target of another hidden size",
    "target_vocab": "made for a target with another vocabulary",
    "target_unlike": "trained for another target than this one",
    "tokenizer_unlike": "trained with another tokenizer than this one",
    "manifest_missing": "no manifest says for which target it was trained",
    "manifest_damaged": "the manifest cannot be read",
}
"""Every code with its meaning; a code is never given another meaning."""


@dataclass(frozen=True)
class Fault:
    """One thing found: its code, where it is, and what was found and expected in one sentence."""

    code: str
    message: str
    where: str = "config.json"

    def __str__(self) -> str:
        return self.message
