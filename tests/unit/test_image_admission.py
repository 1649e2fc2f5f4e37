import pytest
from msgspec.structs import replace

from negamax.base.errors import InvalidRequestError
from negamax.engine.client.output import admit
from negamax.scheduler.request import ImageInput, SamplingParams
from tests.stub_engine import make_vision
from tests.unit.test_stop_strings import INFO

VISION = make_vision()
IMAGE = ImageInput(offset=1, num_tokens=1, grid=(2, 2), digest=b"d", pixels=bytes(28 * 28 * 3))


def test_images_need_a_tower() -> None:
    with pytest.raises(InvalidRequestError, match="nano reads text only") as refusal:
        admit([9, 5, 10], SamplingParams(), info=INFO, images=[IMAGE])
    assert refusal.value.code == "unsupported_content"
    seeing = replace(INFO, vision=VISION)
    assert admit([9, 5, 10], SamplingParams(), info=seeing, images=[IMAGE]).max_tokens == 4093
