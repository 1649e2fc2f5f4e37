"""List the input items of a stored response in pages. As in OpenAI's API, every item has an id."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from negamax.api.dialects.responses.items import ItemList
from negamax.api.dialects.responses.store import Item
from negamax.api.schemas.request_model import check_choice, describe, refuse

MAX_PAGE = 100  # Limit of items per page, as in OpenAI's API.
_DEFAULT_PAGE = 20
_ORDERS = ("asc", "desc")
# Id prefix of each item type. The server adds no `status` to items of unlisted types.
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}
_TEXT_PARTS = ("text", "input_text", "output_text")


def build_page(
    items: Sequence[Mapping[str, Any]], query: Mapping[str, str], *, response_id: str
) -> ItemList:
    """Return a page of the input `items`. `query` may have `order`, `limit` and `after`.

    By default, the last item comes first. Raises `InvalidRequestError` for an invalid `query`.
    """
    order, limit, after = query.get("order", "desc"), query.get("limit"), query.get("after")
    check_choice(order, _ORDERS, "order")
    size = _DEFAULT_PAGE
    if limit is not None:
        size = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else 0
        if not 1 <= size <= MAX_PAGE:
            refuse("limit", f"the value {describe(limit)} is not allowed; send 1 to {MAX_PAGE}")
    ids = _build_ids(items, response_id)
    numbers = list(range(len(items)))
    if order == "desc":
        numbers.reverse()
    begin = 0
    if after is not None:
        if after not in ids:
            refuse("after", f"{describe(after)} is not the id of an input item of this response")
        begin = numbers.index(ids.index(after)) + 1
    page = numbers[begin : begin + size]
    return ItemList(
        data=[_complete_item(items[number], ids[number]) for number in page],
        first_id=ids[page[0]] if page else None,
        last_id=ids[page[-1]] if page else None,
        has_more=begin + size < len(items),
    )


def _build_ids(items: Sequence[Mapping[str, Any]], response_id: str) -> list[str]:
    """Return the ids of items. A missing id is built from the item's index and the response id."""
    ids: dict[str, None] = {}  # The keys are ids, in the order of `items`.
    for number, item in enumerate(items):
        item_id = item.get("id")
        if not isinstance(item_id, str) or not item_id or item_id in ids:
            prefix = _ID_PREFIXES.get(item.get("type", "message"), "item")
            item_id = f"{prefix}_{number:04x}{response_id.removeprefix('resp_')}"
        ids[item_id] = None
    return list(ids)


def _complete_item(item: Mapping[str, Any], item_id: str) -> Item:
    kind = item.get("type", "message")
    listed: Item = {**item, "type": kind, "id": item_id}
    if kind in _ID_PREFIXES and not isinstance(item.get("status"), str):
        listed["status"] = "completed"
    match kind:
        case "message":
            listed["content"] = _build_content(item)
        case "reasoning" if not isinstance(item.get("summary"), list):
            listed["summary"] = []
        case "function_call" if not isinstance(item.get("arguments"), str):
            listed["arguments"] = _encode_json(item.get("arguments") or {})
        case "function_call_output" | "custom_tool_call_output":
            output = item.get("output")
            listed["output"] = (
                [_complete_part(part, "input_text") for part in output]
                if isinstance(output, list)
                else output
                if isinstance(output, str)
                else _encode_json(output)
            )
    return listed


def _build_content(item: Mapping[str, Any]) -> list[Any]:
    content = item.get("content")
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    if isinstance(content, list):
        return [_complete_part(part, kind) for part in content]
    return [_complete_part({"text": content or ""}, kind)]


def _complete_part(part: Any, text_kind: str) -> Any:
    if not isinstance(part, dict):
        return part
    kind = part.get("type", "text")
    if kind in _TEXT_PARTS:
        more: Item = {"annotations": []} if text_kind == "output_text" else {}
        return {**more, **part, "type": text_kind}
    return {"detail": "auto", **part} if kind == "input_image" else part


def _encode_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
