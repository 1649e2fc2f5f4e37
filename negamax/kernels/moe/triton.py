"""Mixture of experts: routing takes one launch; experts take two launches, or four in prefills.

A pair is one choice of a token: pair = token * top_k + choice. A shared expert is the last choice
of every token. The experts compute

    h[pair]   = silu(gate x[token]) * (up x[token])       [M * top_k, width], or another `SwiGlu`
    out[pair] = topk_weight[pair] * (down h[pair])        [M, P, hidden], the next norm sums over P

    kernel   M on an H200     launches  a program of the GEMMs
    gemv     to 4 or 8        2         a pair and some rows of its expert; plain activations; plain
                                        weights on the CUDA cores, packed ones on the tensor cores;
                                        P = top_k / choices
    small_m  to 256           2         an expert and some of its rows: it finds the expert's tokens
                                        in topk_ids, and the weights are the tall operand, so that
                                        few tokens waste no tensor-core rows; P = top_k
    large_m  the rest         4         pairs are sorted by expert first; the tokens are the tall
                                        operand (packed weights: the weights); P = top_k

All three kernels support plain, FP8 and packed weights. If the quantization method of packed 8-bit
weights also rounds activations, large_m multiplies 8-bit with 8-bit values. With one or two tokens
one launch runs both the router and the norm before it (`triton_norm_route.py`).

The gate and up rows of an expert are in one weight [2 * width, hidden], gate rows first. FP8
weights have a scale per block of 128 x 128. With FP8 weights h is also FP8, with a scale per pair
and 128 columns, except in gemv. `tiles.py` has the tile sizes.
"""

from functools import cache, partial

import torch
from torch import Tensor

from negamax.formats.floats import E4M3, E4M3_GROUPS, PLAIN
from negamax.formats.platform import Feature
from negamax.formats.readable import reads_e4m3_blocks, reads_packed, reads_w8a8
from negamax.formats.tensor_format import StoredWeight
from negamax.kernels.activations import GROUP, SILU, QuantizedActivations, SwiGlu, unquantized
from negamax.kernels.launch.triton import triton_kernel
from negamax.kernels.moe import tiles
from negamax.kernels.moe.op import EXPERTS, NORM_ROUTE, PLACE, ROUTE, SelectedExperts
from negamax.kernels.moe.triton_gemv import experts_gemv
from negamax.kernels.moe.triton_norm_route import norm_route
from negamax.kernels.moe.triton_place import place
from negamax.kernels.moe.triton_prefill import experts_large_m
from negamax.kernels.moe.triton_route import prepare_gate, route
from negamax.kernels.moe.triton_shared import ExpertConstants, PreparedExperts
from negamax.kernels.moe.triton_small_m import experts_small_m
from negamax.kernels.op import W8A8, WEIGHT_ONLY
from negamax.kernels.quantize.native import to_native
from negamax.kernels.weight_only.layout import pack

# Equal constants are one cached object, because comparing two objects costs 0.3 us per launch.
_constants = cache(ExpertConstants)


def prepare_experts(
    gate_up: StoredWeight, down: StoredWeight, *, activation: SwiGlu = SILU, shared: bool = False
) -> PreparedExperts:
    """Prepare stacked weights, which are plain or FP8 (E4M3 with a scale per block)."""
    w1, w2 = gate_up.values, down.values
    assert w1.is_contiguous() and w2.is_contiguous()
    constants = _constants(
        *w2.shape[1:], FP8=gate_up.format is not PLAIN, ACTIVATION=activation, SHARED=shared
    )
    if not constants.FP8:
        return PreparedExperts(w1, w2, w1, w2, constants)
    assert constants.HIDDEN % GROUP == 0 and constants.WIDTH % GROUP == 0, (
        f"FP8 experts need sizes that are multiples of {GROUP}, not hidden {constants.HIDDEN} and "
        f"width {constants.WIDTH}"
    )
    w1, w1_scale = to_native(w1, gate_up.scale.contiguous())
    w2, w2_scale = to_native(w2, down.scale.contiguous())
    return PreparedExperts(w1, w2, w1_scale, w2_scale, constants)


def prepare_packed(
    gate_up: StoredWeight, down: StoredWeight, *, activation: SwiGlu = SILU, shared: bool = False
) -> PreparedExperts:
    """Prepare stacked weights of 4 or 8 bits, in a format that `reads_packed` accepts."""
    w1, w2 = pack(gate_up), pack(down)
    constants = _constants(
        w1.packing.K, w2.packing.K, FP8=False, PACKED=True, GATE_UP=w1.packing, DOWN=w2.packing,
        ACTIVATION=activation, SHARED=shared,
    )  # fmt: skip
    return PreparedExperts(w1.tensors, w2.tensors, w1.qweight, w2.qweight, constants)


def experts(
    x: Tensor | QuantizedActivations, selected: SelectedExperts, prepared: PreparedExperts
) -> Tensor:
    """Run experts on x [M, hidden] -> partial sums [M, P, hidden]."""
    M = selected.ids.shape[0]
    assert selected.ids.is_contiguous() and selected.weights.is_contiguous()
    assert selected.ids.dtype == torch.int32
    if M == 0:
        return unquantized(x).unsqueeze(1)
    constants, sizes = prepared.constants, tiles.tiles_for(selected.ids.device)
    tile = None
    if constants.PACKED:
        gate_up, down = constants.GATE_UP, constants.DOWN
        assert gate_up is not None and down is not None
        tile = sizes.packed_gemv(M=M, gate_up=gate_up, down=down)
    elif sizes.gemv_max_m(constants.WIDTH) >= M:
        tile = sizes.gemv(constants.WIDTH, hidden=constants.HIDDEN)
    if tile is not None:
        return experts_gemv(unquantized(x), selected, prepared, tile)
    run = experts_small_m if M <= tiles.SMALL_M_MAX_M else experts_large_m
    return run(x, selected, prepared)


def experts_rounded(
    x: Tensor | QuantizedActivations, selected: SelectedExperts, prepared: PreparedExperts
) -> Tensor:
    """Run the experts with weights from `prepare_packed` in a format that `reads_w8a8` accepts.
    With more than tiles.SMALL_M_MAX_M tokens, activations are also rounded to 8 bits.
    """
    if selected.ids.shape[0] <= tiles.SMALL_M_MAX_M:
        return experts(x, selected, prepared)
    return experts_large_m(x, selected, prepared, rounded=True)


KERNELS = (
    triton_kernel(ROUTE, route, prepare_gate, requires={Feature.SPIN_WAIT}),
    triton_kernel(
        ROUTE, route, partial(prepare_gate, spin_wait=False), provider="triton_last_arrival"
    ),
    triton_kernel(NORM_ROUTE, norm_route, prepare_gate, requires={Feature.SPIN_WAIT}),
    triton_kernel(
        NORM_ROUTE, norm_route, partial(prepare_gate, spin_wait=False),
        provider="triton_two_launches",
    ),
    triton_kernel(PLACE, place),
    triton_kernel(EXPERTS, experts, prepare_experts),
    triton_kernel(
        EXPERTS, experts, prepare_experts, requires={Feature.FP8}, reads=reads_e4m3_blocks,
        activation=E4M3_GROUPS, columns=GROUP,
    ),
    *(
        triton_kernel(
            EXPERTS, experts_rounded, prepare_packed, provider=W8A8, requires=needs,
            reads=partial(reads_w8a8, element=element),
        )
        for element, needs in (("int8", {Feature.INT8}), (E4M3, {Feature.FP8, Feature.E4M3FN}))
    ),
    triton_kernel(EXPERTS, experts, prepare_packed, provider=WEIGHT_ONLY, reads=reads_packed),
)  # fmt: skip
