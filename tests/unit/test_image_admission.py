import pytest
from msgspec.structs import replace

from negamax.base.errors import InvalidRequestError
from negamax.engine.client.output import admit
from negamax.scheduler.request import ImageInput, SamplingParams
from tests.stub_engine import make_vision
from tests.unit.plan_support import RankScheduler, make_scheduler
from tests.unit.test_stop_strings import INFO

VISION = make_vision()
IMAGE = ImageInput(offset=1, num_tokens=1, grid=(2, 2), digest=b"d", pixels=bytes(28 * 28 * 3))


def test_images_need_a_tower() -> None:
    with pytest.raises(InvalidRequestError, match="nano reads text only") as refusal:
        admit([9, 5, 10], SamplingParams(), info=INFO, images=[IMAGE])
    assert refusal.value.code == "unsupported_content"
    seeing = replace(INFO, vision=VISION)
    assert admit([9, 5, 10], SamplingParams(), info=seeing, images=[IMAGE]).max_tokens == 4093


def encode_in_parts() -> RankScheduler:
    """Plan the first of the four parts of an image beside a decode. The prompt has text before."""
    large = ImageInput(offset=9, num_tokens=1600, grid=(80, 80), digest=b"d", pixels=b"large")
    limits = {"max_num_batched_tokens": 2000, "num_blocks": 900, "max_model_len": 2000}
    scheduler = make_scheduler(**limits, encoder_tokens=1600)
    scheduler.add("decode", 4, max_tokens=20)
    scheduler.step()
    scheduler.add("image", 1612, images=[large], max_tokens=2)
    plan = scheduler.next_plan()
    assert plan.num_scheduled == [1, 9] and not plan.images
    assert [(job.parts, job.pixels) for job in plan.encodes] == [((0, 1, 4), b"large")]
    scheduler.commit(plan)
    return scheduler


def test_a_large_image_is_encoded_in_parts_beside_decodes() -> None:
    scheduler = encode_in_parts()
    for part in (1, 2):
        plan = scheduler.next_plan()
        assert plan.num_scheduled == [1]
        assert [(job.parts, job.pixels) for job in plan.encodes] == [((part, part + 1, 4), b"")]
        scheduler.commit(plan)
    plan = scheduler.next_plan()
    assert plan.num_scheduled == [1, 1603] and plan.encodes[0].parts == (3, 4, 4)
    assert [(run.start, run.stop) for run in plan.images] == [(9, 1609)]


@pytest.mark.parametrize("end", ["decode", "image", "lost"])
def test_parts_end_with_the_decodes_or_with_the_request(end: str) -> None:
    scheduler = encode_in_parts()
    if end == "lost":
        plan = scheduler.next_plan()
        assert {one.request_id for one in scheduler.fail(plan, "lost")} == {"decode", "image"}
        assert scheduler.plan() is None
    else:
        scheduler.end(end, "abort")
        plan = scheduler.next_plan()
        assert [job.parts for job in plan.encodes] == [(1, 4, 4)] * (end == "decode")
        assert plan.num_scheduled == [1603 if end == "decode" else 1]
        scheduler.commit(plan)
    if end == "image":
        assert scheduler.rank.encoder.num_free_pages == 100
        scheduler.add("small", 30, images=[IMAGE])  # The rank may encode another image.
        assert [job.parts for job in scheduler.next_plan().encodes] == [(0, 1, 1)]
    else:
        scheduler.run_all()
        assert scheduler.rank.encoder.num_free_pages == 100
