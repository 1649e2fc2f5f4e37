"""MiniMax-M3's vision tower and projector, which turn pixels into embeddings of image tokens.

  h = layer_norm(patches W^T)
  per layer:  h += attention(layer_norm(h));  h += fc2(gelu(fc1(layer_norm(h))))
  h = linear_2(gelu(linear_1(h)));  four adjacent rows joined;  linear_2(gelu(linear_1(h)))

Attention is bidirectional within an image. The rotary embedding rotates the first dimensions of a
head in three equal parts: by time (always 0), row and column of the patch. One image token encodes
a square of patches. Squares, and patches inside a square, are in row order.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.config.vision import VisionSpec
from negamax.kernels.attention.op import ROPE
from negamax.kernels.registry import KernelTable
from negamax.layers.weights import WeightSlot
from negamax.models.decoder import PartialImages
from negamax.models.minimax_m3 import names
from negamax.quantization.scheme import WeightFormat

# CLIP's mean and standard deviation of red, green and blue, for pixel values from 0 to 1
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
# number of patches per call of an MLP, to bound memory; a multiple of the patches per image token
_ROWS = 4096


class _Weights:
    """Allocates unquantized parameters and creates their weight slots."""

    def __init__(self, weights: WeightFormat) -> None:
        self.weights, self.slots = weights, list[WeightSlot]()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        target = torch.empty(shape, dtype=self.weights.dtype, device=self.weights.device)
        self.slots.append(WeightSlot(name, shape, target=target))
        return target

    def take_linear(self, name: str, rows: int, columns: int) -> Callable[[Tensor], Tensor]:
        """Return a function from x [T, columns] to x W^T + b [T, rows]."""
        weight, bias = (
            self.take(f"{name}.weight", (rows, columns)),
            self.take(f"{name}.bias", (rows,)),
        )
        return lambda x: F.linear(x, weight, bias)

    def take_norm(self, name: str, width: int, eps: float) -> Callable[[Tensor], Tensor]:
        """Return a function from x [T, width] to layer_norm(x)."""
        weight, bias = self.take(f"{name}.weight", (width,)), self.take(f"{name}.bias", (width,))
        return lambda x: F.layer_norm(x, (width,), weight, bias, eps)

    def take_mlp(
        self, mlp: tuple[str, str], inputs: int, width: int, outputs: int
    ) -> Callable[[Tensor], Tensor]:
        """Return a function from x [T, inputs] to linear_2(gelu(linear_1(x))) [T, outputs]."""
        first = self.take_linear(mlp[0], width, inputs)
        second = self.take_linear(mlp[1], outputs, width)
        return lambda x: torch.cat([second(F.gelu(first(rows))) for rows in x.split(_ROWS)])


class _VisionLayer:
    """A vision layer: a norm, bidirectional attention, a second norm, and an MLP."""

    def __init__(
        self, layer: int, spec: VisionSpec, weights: _Weights, kernels: KernelTable
    ) -> None:
        own, hidden = names.vision_layer(layer), spec.hidden_size
        self._heads, self._rope = (spec.num_heads, spec.head_dim), kernels[ROPE].run
        self._norms = [weights.take_norm(name, hidden, spec.layer_norm_eps) for name in own.norms]
        self._qkv = [weights.take_linear(name, hidden, hidden) for name in own.qkv]
        self._out = weights.take_linear(own.out, hidden, hidden)
        self._mlp = weights.take_mlp(own.mlp, hidden, spec.intermediate_size, hidden)

    def __call__(self, h: Tensor, angles: tuple[Tensor, Tensor], sizes: Sequence[int]) -> Tensor:
        """Run on patches h [N, hidden], `sizes` per image; angles cos, sin [N, 1, rotated] fp32."""
        x = self._norms[0](h)
        q, k, v = (project(x).unflatten(-1, self._heads) for project in self._qkv)
        q, k = self._rope(q, k, *angles)
        of_images = zip(*(part.split(list(sizes)) for part in (q, k, v)), strict=True)
        mixed = torch.cat([_attend(*parts) for parts in of_images])
        h = h + self._out(mixed.flatten(1))
        return h + self._mlp(self._norms[1](h))


class VisionTower:
    """The vision tower and projector, whose weights are not sharded."""

    def __init__(self, spec: VisionSpec, weights: WeightFormat, kernels: KernelTable) -> None:
        own, hidden = _Weights(weights), spec.hidden_size
        side, text = spec.patch_size, spec.text_hidden
        self.spec, self._dtype, self._device = spec, weights.dtype, weights.device
        self._patches = own.take(
            names.PATCHES, (hidden, 3, spec.temporal_patch_size, side, side)
        ).flatten(1)
        self._norm = own.take_norm(names.PATCH_NORM, hidden, spec.layer_norm_eps)
        self._layers = [_VisionLayer(i, spec, own, kernels) for i in range(spec.num_layers)]
        self._project = own.take_mlp(names.PROJECTOR, hidden, spec.projector_hidden_size, text)
        merged = text * spec.patches_per_token
        self._merge = own.take_mlp(names.MERGE, merged, spec.projector_hidden_size, text)
        self.slots = own.slots
        rotated = 2 * (spec.head_dim // 3 // 2)  # rotated dimensions per axis (time, row, column)
        exponents = torch.arange(0, rotated, 2).float() / rotated
        self._frequencies = (1.0 / spec.rope_theta**exponents).to(weights.device)
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=weights.device)
            for values in (MEAN, STD)
        )

    def __call__(self, images: Sequence[Tensor]) -> Tensor:
        return self.finish(self.run_part(self.start(images), 0, 1, 1))

    def start(self, images: Sequence[Tensor]) -> PartialImages:
        """Embed the patches of `images`, each uint8 [height, width, 3], as one batch.

        Heights and widths are multiples of `VisionSpec.token_pixels`.
        """
        side = self.spec.patch_size
        grids = [(image.shape[0] // side, image.shape[1] // side) for image in images]
        sizes = [rows * columns for rows, columns in grids]
        angles = self._angles(grids)
        h = self._norm(torch.cat([F.linear(self._cut(image), self._patches) for image in images]))
        return PartialImages(h, angles, sizes)

    def run_part(
        self, images: PartialImages, first: int, stop: int, num_parts: int
    ) -> PartialImages:
        h, count = images.h, len(self._layers)
        for layer in self._layers[count * first // num_parts : count * stop // num_parts]:
            h = layer(h, images.angles, images.sizes)
        return replace(images, h=h)

    def finish(self, images: PartialImages) -> Tensor:
        squares = self._project(images.h).unflatten(0, (-1, self.spec.patches_per_token))
        return self._merge(squares.flatten(1))

    def _cut(self, image: Tensor) -> Tensor:
        """Normalize an image, and split it into patches [patches, values] in the compute dtype."""
        merge, side = self.spec.spatial_merge_size, self.spec.patch_size
        pixels = (image.float() / 255 - self._mean) / self._std
        rows, columns = image.shape[0] // (merge * side), image.shape[1] // (merge * side)
        cut = pixels.to(self._dtype).view(rows, merge, side, columns, merge, side, 3)
        patches = cut.permute(0, 3, 1, 4, 6, 2, 5)  # axes: square (2), patch (2), color, pixel (2)
        frames = patches.unsqueeze(5).expand(*[-1] * 5, self.spec.temporal_patch_size, -1, -1)
        return frames.reshape(-1, self.spec.patch_values)

    def _angles(self, grids: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Return cos and sin [patches, 1, rotated] fp32; the first half of sin is negated."""
        merge, places = self.spec.spatial_merge_size, []
        for rows, columns in grids:
            grid = torch.stack(
                torch.meshgrid(
                    torch.arange(rows, device=self._device),
                    torch.arange(columns, device=self._device),
                    indexing="ij",
                )
            )  # row and column of each patch: [2, rows, columns]
            squares = grid.view(2, rows // merge, merge, columns // merge, merge)
            places.append(squares.transpose(2, 3).flatten(1))
        row, column = torch.cat(places, dim=1).unsqueeze(-1) * self._frequencies
        angles = torch.cat([torch.zeros_like(row), row, column], dim=-1)
        signed = torch.cat([-angles, angles], dim=-1).unsqueeze(1)
        return signed.cos(), signed.sin()


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with q, k, v [N, heads, head_dim] of one image -> [N, heads, head_dim]."""
    parts = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    return F.scaled_dot_product_attention(*parts).squeeze(0).transpose(0, 1)
