"""Images of a prompt are refused unless the engine has loaded a vision tower."""

import pytest
from msgspec.structs import replace

from negamax.base.errors import InvalidRequestError
from negamax.config.vision import VisionSpec
from negamax.engine.client.output import admit
from negamax.scheduler.request import ImageInput, SamplingParams
from tests.unit.test_stop_strings import INFO

VISION = VisionSpec(
    hidden_size=160, num_layers=1, num_heads=2, intermediate_size=64, patch_size=14,
    spatial_merge_size=2, temporal_patch_size=2, projector_hidden_size=64, text_hidden=64,
    rope_theta=10_000.0, layer_norm_eps=1e-5, image_token_id=5, image_start_id=9, image_end_id=10,
)  # fmt: skip
IMAGE = ImageInput(offset=1, num_tokens=1, grid=(2, 2), digest=b"d", pixels=bytes(28 * 28 * 3))


def test_images_need_a_tower() -> None:
    with pytest.raises(InvalidRequestError, match="1 images; nano reads text only") as refusal:
        admit([9, 5, 10], SamplingParams(), info=INFO, images=[IMAGE])
    assert refusal.value.code == "unsupported_content"
    seeing = replace(INFO, vision=VISION)
    assert admit([9, 5, 10], SamplingParams(), info=seeing, images=[IMAGE]).max_tokens == 4093
