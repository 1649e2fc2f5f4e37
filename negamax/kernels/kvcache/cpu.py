"""Cache row indices and rope angles on the CPU. NumPy computes the indices, because its calls take
less time than PyTorch's calls. `kernels/rowwise.py` makes the angles batch-invariant.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.kvcache.op import LOCATE, TokenTables, slots_of
from negamax.kernels.op import Kernel
from negamax.kernels.rowwise import apply, padded_rows


def locate(
    tokens: TokenTables, frequencies: Tensor, *, kv_heads: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = tokens.positions.shape[0]
    slots = slots_of(tokens, block_size=block_size).numpy()
    within = slots % block_size
    first_head = (slots - within) * kv_heads + within  # [T], cache rows of KV head 0
    rows = first_head[:, None] + np.arange(0, kv_heads * block_size, block_size)
    padding = padded_rows(num_tokens, width=frequencies.shape[0]) - num_tokens
    angles = F.pad(tokens.positions, (0, padding)).view(-1, 1, 1) * frequencies
    cos, sin = apply(torch.cos, angles)[:num_tokens], apply(torch.sin, angles)[:num_tokens]
    return cos, sin, torch.from_numpy(rows.ravel())


KERNELS = (Kernel(LOCATE, "cpu", locate),)
