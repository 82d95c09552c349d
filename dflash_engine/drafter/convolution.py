"""DFlash 2's convolution over a block: kernels partly learned, partly computed from the token, causal in the block.

output[t] = sum over o < k of (base[o] + dynamic[t, o], repeated over its group) * x[t - o], zeros before the block.
One projection of the input gives the kernels of both passes, before (`prepare`) and after (`finish`) the part that
it surrounds. Source: z-lab's dflash 0.1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_engine.drafter.config import DFlash2Config

__all__ = ["BlockConvolution"]


class BlockConvolution(nn.Module):
    """Grouped dynamic causal convolution around attention or MLP."""

    def __init__(self, hidden_size: int, config: DFlash2Config) -> None:
        super().__init__()
        self.kernel_size, self.group_size = config.conv_kernel_size, config.conv_group_size
        self.groups = hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * self.kernel_size * self.groups, bias=False)

    def prepare(self, x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """x [b, Q, H], Q a multiple of block_size -> (the same shape, kernels [b, Q, k, groups] for `finish`)."""
        shape = (*x.shape[:-1], 2, self.kernel_size, self.groups)
        dynamic = self.kernel_projection(x).view(shape)  # [b, Q, 2, k, groups]
        return self._convolve(x, dynamic[..., 0, :, :], self.base_kernel[0], block_size), dynamic[..., 1, :, :]

    def finish(self, x: Tensor, dynamic: Tensor, block_size: int) -> Tensor:
        """x [b, Q, H] and the kernels that `prepare` gave -> [b, Q, H]."""
        return self._convolve(x, dynamic, self.base_kernel[1], block_size)

    def _convolve(self, x: Tensor, dynamic: Tensor, base: Tensor, block_size: int) -> Tensor:
        split = (-1, block_size, self.groups, self.group_size)
        blocks = x.reshape(split)  # [b * N, B, groups, g]
        kernels = dynamic.reshape(-1, block_size, self.kernel_size, self.groups, 1)
        out = torch.zeros_like(blocks)
        for offset in range(min(self.kernel_size, block_size)):
            shifted = functional.pad(blocks[:, : block_size - offset], (0, 0, 0, 0, offset, 0))
            out = out + base[offset].view(1, 1, self.groups, self.group_size).to(x.dtype) * shifted
            out = torch.addcmul(out, kernels[:, :, offset], shifted)
        return out.reshape(x.shape)
