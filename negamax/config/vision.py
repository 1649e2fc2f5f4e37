"""The sizes of a vision tower and its projector."""

from dataclasses import dataclass

from negamax.config.fields import refuse


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """A vision transformer over patches, a projector, and an MLP that merges adjacent patches.

    One image token encodes a square of `spatial_merge_size`^2 patches. Raises `ConfigError`.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    patch_size: int  # Height and width of a patch in pixels.
    spatial_merge_size: int  # An image token covers a square with this number of patches per side.
    temporal_patch_size: int  # Frames per patch; an image is repeated as all frames.
    projector_hidden_size: int
    text_hidden: int  # hidden size of the text model
    rope_theta: float
    layer_norm_eps: float
    image_token_id: int
    image_start_id: int  # Token before the first image token of an image.
    image_end_id: int  # Token after the last image token of an image.

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            refuse("vision_config.hidden_size", self.hidden_size, f"a multiple of {self.num_heads}")
        if self.head_dim < 6:
            refuse("vision_config.num_attention_heads", self.num_heads, "heads of width 6 or more")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Number of values per patch: three channels of each pixel of each frame."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.spatial_merge_size**2

    @property
    def token_pixels(self) -> int:
        """Height and width in pixels of the square that an image token covers."""
        return self.patch_size * self.spatial_merge_size
