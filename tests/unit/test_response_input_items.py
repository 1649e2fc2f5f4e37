from typing import Any

import pytest

from negamax.api.dialects.responses.input_items import build_page
from negamax.base.errors import InvalidRequestError

RESPONSE = "resp_" + "ab" * 23 + "07"


RESULT = {"type": "function_call_output", "call_id": "c", "output": {"n": 2}}
RESULT |= {"status": "incomplete"}


def items_of(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return build_page(items, {"order": "asc", "limit": "100"}, response_id=RESPONSE).data


def users(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"number {number}"} for number in range(count)]


def test_items_are_completed_and_their_ids_never_repeat() -> None:
    user, assistant, image, called, result, thought = items_of(
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"n": 1}},
        RESULT,
        {"type": "reasoning", "encrypted_content": "x"},
    )
    assert (user["type"], user["status"]) == ("message", "completed")
    assert user["content"] == [{"type": "input_text", "text": "Hello"}]
    assert assistant["content"] == [{"type": "output_text", "text": "Hi", "annotations": []}]
    assert image["content"][0]["detail"] == "auto"
    assert (called["arguments"], result["output"]) == ('{"n": 1}', '{"n": 2}')
    assert result["status"] == "incomplete"
    assert thought["summary"] == []
    items = [*users(2), {"role": "user", "content": "x", "id": "msg_mine"}]
    ids = [item["id"] for item in items_of(*items, items[-1])]
    assert ids[2] == "msg_mine" and len(set(ids)) == 4
    assert ids == [item["id"] for item in items_of(*items, items[-1])]
    # The last two characters of an id name the server process that owns the response.
    assert all(item_id.endswith(RESPONSE[-2:]) for item_id in (*ids[:2], ids[3]))


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_add_up_to_all_items(order: str) -> None:
    items, texts = users(25), []
    query = {"order": order}
    while True:
        page = build_page(items, query, response_id=RESPONSE)
        texts += [item["content"][0]["text"] for item in page.data]
        assert (page.first_id, page.last_id) == (page.data[0]["id"], page.data[-1]["id"])
        if not page.has_more:
            break
        assert len(page.data) == 20
        query["after"] = str(page.last_id)
    expected = [item["content"] for item in items]
    assert texts == (expected if order == "asc" else expected[::-1])


def test_the_last_item_comes_first_and_nothing_after_the_end() -> None:
    page = build_page(users(3), {"limit": "1"}, response_id=RESPONSE)
    assert page.data[0]["content"][0]["text"] == "number 2" and page.has_more
    last = items_of(*users(3))[0]["id"]
    page = build_page(users(3), {"after": last}, response_id=RESPONSE)
    assert (page.data, page.first_id, page.last_id, page.has_more) == ([], None, None, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [("order", "up"), ("limit", "0"), ("limit", "101"), ("limit", "²"), ("after", "msg_other")],
)
def test_pages_that_are_none_are_refused(field: str, value: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_page(users(2), {field: value}, response_id=RESPONSE)
    assert caught.value.param == field
