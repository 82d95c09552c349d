"""Feature capture: the outputs of tapped target blocks, and no more of the target than that needs.

Layer id i means the output of 0-based block i, `hidden_states[i + 1]` of transformers, as in the published
drafters. Taps are read by forward hooks on the blocks themselves, because indices into transformers' tuple
have meant different things in different engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dflash_engine.errors import TargetError
from dflash_engine.target.load import Target

__all__ = ["capture", "check_layer_ids", "keep_output"]


class _LastTapReachedError(Exception):
    """Leaves the target's forward once the last tapped block has run; later blocks and the head are not needed.

    A shortened list of blocks would do too, but it changes the model that other calls use, and models index
    what they keep for each block by the configuration's count.
    """


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> None:
    """Raise TargetError for ids that cannot be tapped.

    The last block is refused: for it transformers' hidden state is after the final norm and a hook's is
    before it, so drafters that tap it do not agree on what they saw.
    """
    outside = [i for i in layer_ids if not 0 <= i < num_layers - 1]
    if outside or not layer_ids:
        raise TargetError(f"tapped layers {list(layer_ids)}: expected ids within 0..{num_layers - 2} of this target")


@torch.no_grad()
def capture(target: Target, input_ids: Tensor, lengths: Tensor, layer_ids: Sequence[int]) -> Tensor:
    """Taps [b, S, K * H] of right-padded input_ids [b, S] int64 with real lengths [b], in the order of layer_ids.

    Positions at and beyond a row's length are zero. Causal attention keeps padding on the right from reaching
    any real position, so a row equals the same row alone.
    """
    check_layer_ids(layer_ids, target.num_layers)
    found: dict[int, Tensor] = {}
    last = max(layer_ids)
    handles = [target.layers[i].register_forward_hook(keep_output(found, i, last)) for i in sorted(set(layer_ids))]
    real = torch.arange(input_ids.shape[1])[None] < lengths[:, None]  # [b, S]
    try:
        # No attention mask: attention is causal and the padding stands on the right, so no real position sees it,
        # and a mask would cost sdpa its causal kernel (twice the time for a whole capture on a CPU).
        target.model(input_ids=input_ids, use_cache=False)
    except _LastTapReachedError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    taps = torch.cat([found[i] for i in layer_ids], dim=-1)  # [b, S, K * H]
    return taps * real[..., None].to(taps.dtype)


def keep_output(
    found: dict[int, Tensor], layer: int, last: int | None = None
) -> Callable[[nn.Module, tuple[object, ...], Tensor | tuple[Tensor, ...]], None]:
    """A forward hook that keeps a block's output; after the block `last` it leaves the forward."""

    def hook(module: nn.Module, arguments: tuple[object, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        found[layer] = output[0] if isinstance(output, tuple) else output
        if layer == last:
            raise _LastTapReachedError

    return hook
