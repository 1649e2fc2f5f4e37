import json

import pytest

from negamax.api.dialects.responses.store import (
    Item,
    ResponseStore,
    StoredResponse,
    StoredTurn,
    decode_items,
    encode_shown,
    trim_setting,
)

LONG = "x" * 5000


def kept(
    parent: StoredTurn | None, number: int, *, size: int = 10, tenant: str = ""
) -> StoredResponse:
    items = [{"id": f"{name}{number}", "text": name[-1] * size} for name in ("in", "out")]
    given, said = (json.dumps([item]).encode() for item in items)
    turn = StoredTurn(parent, input_items=given, output_items=said)
    return StoredResponse(b'{"body": 1}', turn, [f"out{number}"], tenant)


def test_least_used_responses_make_room_and_later_states_take_their_place() -> None:
    store = ResponseStore(max_responses=3)
    for number in range(3):
        store.put(f"r{number}", kept(None, number))
    assert store.get("r0")  # used again
    store.put("r3", kept(None, 3))
    assert [name for name in ("r0", "r1", "r2", "r3") if store.get(name)] == ["r0", "r2", "r3"]
    # Ids that the store did not issue are not found.
    assert store.items({"out0", "out1", "out3", "in0", "x"}) == {
        f"out{number}": {"id": f"out{number}", "text": "t" * 10} for number in (0, 3)
    }
    assert store.items({"out0"}, tenant="another") == {}
    store = ResponseStore()
    first = kept(None, 1)
    store.put("r", first)
    store.put("r", StoredResponse(b"{}", first.turn, ()))
    again = store.get("r")
    assert again and again.body == b"{}" and len(store) == 1
    assert store.num_bytes == 2 + first.turn.num_bytes


def test_bytes_are_bounded_and_come_back_to_zero() -> None:
    store = ResponseStore(max_bytes=5000)
    for number in range(20):
        store.put(f"r{number}", kept(None, number, size=500))
        assert store.num_bytes <= 5000
    assert 0 < len(store) < 5
    store.put("huge", kept(None, 99, size=10_000))
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_tenant_pushes_out_its_own_responses_first() -> None:
    for limits, size in (({"max_bytes": 5000}, 500), ({"max_responses": 4}, 10)):
        store = ResponseStore(**limits)
        store.put("r", kept(None, 0, size=size, tenant="a"))
        for number in range(20):
            store.put(f"r{number}", kept(None, number, size=size, tenant="b"))
        assert store.get("r", tenant="a") and store.get("r19", tenant="b")
        assert store.get("r", tenant="b") is None and not store.remove("r", tenant="b")
        assert len(store) < 6


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        (
            {"type": "web_search_call", "id": "w", "text": LONG},
            {"type": "web_search_call", "id": "w"},
        ),
        ({"role": "user", "content": LONG, "x": [LONG]}, {"role": "user", "content": LONG}),
        (
            {"content": [{"type": "input_image", "image_url": LONG}, {"text": LONG, "y": LONG}]},
            {"content": [{"type": "input_image"}, {"text": LONG}]},
        ),
        ({"type": "function_call_output", "output": LONG}, None),
    ],
    ids=["passed over", "field", "parts", "result"],
)
def test_large_fields_that_are_not_shown_are_not_stored(item: Item, shown: Item | None) -> None:
    assert decode_items(encode_shown([item])) == [item if shown is None else shown]
    tool = {"type": "function", "name": "f", "parameters": {"a": LONG}}
    group = {"type": "namespace", "name": "n", "tools": [{**tool, "x": LONG}]}
    assert trim_setting({**group, "x": LONG}) == {**group, "tools": [tool]}
    assert trim_setting({"type": "web_search", "parameters": LONG}) == {"type": "web_search"}


def test_turns_below_are_shared_and_outlive_their_responses() -> None:
    store = ResponseStore()
    parent: StoredTurn | None = None
    for number in range(3000):  # The chain is deeper than Python's stack.
        response = kept(parent, number)
        store.put(f"r{number}", response)
        parent = response.turn
    whole = store.num_bytes
    for number in range(2999):
        assert store.remove(f"r{number}")
    last = store.get("r2999")
    assert last and whole - store.num_bytes == 2999 * len(last.body)
    items = last.turn.conversation()
    assert [item["id"] for item in items[:4]] == ["in0", "out0", "in1", "out1"]
    assert len(items) == 6000
    assert store.remove("r2999") and not store.remove("r2999")
    assert store.num_bytes == 0
