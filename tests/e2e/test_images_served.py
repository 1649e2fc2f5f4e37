import base64
import io
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from negamax.config.embedded import EMBEDDED
from tests import tiny, tiny_m3
from tests.e2e.conftest import Server, serving
from tests.e2e.test_disaggregation import check_same, serving_pair

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


OPTIONS = (
    "--dtype", "float32", "--num-threads", "1", "--reasoning-parser", "none", "--block-size", "16",
    "--max-num-batched-tokens", "48", "--served-model-name", "seeing",
)  # fmt: skip


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("seeing")
    sizes = tiny_m3.random_sizes(3, vocab_size=4160, num_hidden_layers=2, index_block_size=16)
    sizes |= {
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "bos_token_id": 4130,
        "eos_token_id": 4116,
    }
    model = tiny_m3.make_seeing_model(3, image_token=4121, **sizes)
    tiny.save(model, folder)
    for name in tiny.TOKENIZER_FILES:
        shutil.copy(EMBEDDED["nano-m3"] / name, folder)
    return model, folder


@pytest.fixture(scope="module")
def served(
    seeing: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Server]]:
    log, (model, folder) = tmp_path_factory.mktemp("log") / "log", seeing
    with serving(*OPTIONS, "--num-kv-blocks=256", log_file=log, model=str(folder)) as server:
        yield model, server
        assert "Traceback" not in server.log


def draw(seed: int, height: int = 112, width: int = 140) -> torch.Tensor:
    image: torch.Tensor = tiny_m3.random_image(height, width, torch.Generator().manual_seed(seed))
    return image


def encode(image: torch.Tensor) -> str:
    stream = io.BytesIO()
    Image.fromarray(image.numpy()).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def part(image: torch.Tensor) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encode(image)}"}}


def ask(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = server.post(path, {"model": "seeing", "temperature": 0, **body})
    return found


def chat(*parts: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": list(parts)}],
        "max_tokens": 4,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 5,
    }


def check(model: Any, server: Server, body: dict[str, Any], images: list[torch.Tensor]) -> int:
    """Compare an answer's log-probabilities with transformers. Return the cached tokens."""
    prompt = ask(server, f"{CHAT}/render", body)["token_ids"]
    found = ask(server, CHAT, {**body, "return_token_ids": True})
    assert found["usage"]["prompt_tokens"] == len(prompt)
    assert len(found["choices"]) == body.get("n", 1)
    assert len({str(choice["logprobs"]) for choice in found["choices"]}) == 1
    choice = found["choices"][-1]
    tokens, entries = choice["token_ids"], choice["logprobs"]["content"]
    assert len(tokens) == len(entries) == 4
    assert 4121 not in tokens  # transformers would replace the row of this token.
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens]), **tiny_m3.pixel_values(images)).logits[0]
    expected = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    for row, token, entry in zip(expected, tokens, entries, strict=True):
        assert token == int(row.argmax())
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=1e-3)
        best = [one["logprob"] for one in entry["top_logprobs"]]
        assert best == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)
    details = found["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def test_answers_are_those_of_transformers(served: tuple[Any, Server]) -> None:
    model, server = served
    images = [draw(1), draw(2, 168, 112)]
    text = {"type": "text", "text": "What do these two show? "}
    body = chat(text, part(images[0]), "and", part(images[1]), "?")
    assert check(model, server, body | {"n": 3}, images) == 0
    assert check(model, server, body, images) > 0  # The prefix is cached.
    others = [draw(3), images[1]]  # The other image has the same size.
    changed = chat(text, part(others[0]), "and", part(others[1]), "?")
    prompt = ask(server, f"{CHAT}/render", body)["token_ids"]
    assert 0 < check(model, server, changed, others) <= prompt.index(4121)


def test_all_dialects_show_the_same_image(served: tuple[Any, Server]) -> None:
    _, server = served
    image, limit = draw(4), {"max_tokens": 4}
    source = {"type": "base64", "media_type": "image/png", "data": encode(image)}
    text = {"type": "text", "text": "?"}
    asked = chat(part(image), text)
    reference = ask(server, CHAT, {**asked, "ignore_eos": False})
    blocks = [{"type": "image", "source": source}, text]
    message = {"messages": [{"role": "user", "content": blocks}]}
    anthropic = ask(server, MESSAGES, {**message, **limit})
    url = part(image)["image_url"]["url"]
    items = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "?"}]
    response = ask(
        server, RESPONSES, {"input": [{"role": "user", "content": items}], "max_output_tokens": 4}
    )
    count = reference["usage"]["prompt_tokens"]
    assert ask(server, f"{MESSAGES}/count_tokens", message)["input_tokens"] == count
    usage = anthropic["usage"]
    assert usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) == count
    assert response["usage"]["input_tokens"] == count
    said = reference["choices"][0]["message"]["content"]
    assert "".join(block.get("text", "") for block in anthropic["content"]) == said
    texts = [one["text"] for item in response["output"] for one in item.get("content", ())]
    assert "".join(texts) == said


def test_images_of_results_are_seen(served: tuple[Any, Server]) -> None:
    model, server = served
    images = [draw(5), draw(6)]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = chat(part(images[0]), "use f")
    body["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [part(images[1])]},
    ]
    check(model, server, body, images)


def test_many_requests_with_images_and_a_bad_one(served: tuple[Any, Server]) -> None:
    model, server = served
    bad = chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})

    def refuse() -> None:
        response = server.send(CHAT, bad, model="seeing")
        assert response.status_code == 400
        assert "messages[0].content[0]" in response.text

    with ThreadPoolExecutor(8) as threads:
        bodies = [(chat(part(draw(seed)), str(seed)), [draw(seed)]) for seed in range(10, 16)]
        running = [threads.submit(check, model, server, *one) for one in bodies]
        running += [threads.submit(refuse) for _ in range(4)]
        for one in running:
            one.result()


def test_prompts_with_images_come_from_another_server(
    seeing: tuple[Any, Path], tmp_path: Path
) -> None:
    with serving_pair(tmp_path, *OPTIONS, model=str(seeing[1])) as pair:
        bodies = [chat("What does this show?", part(draw(seed, 224, 252)), "?") for seed in (1, 2)]
        for body in (*bodies, chat("An image ends the prompt: ", part(draw(3)))):
            check_same(pair, CHAT, body | {"max_tokens": 12, "temperature": 0})
        # The prompts share the blocks before the images, which have equal sizes in two prompts.
        assert pair[1].gauge("negamax:pulled_kv_blocks_total") == 15
        assert pair[1].gauge("negamax:failed_remote_prefills_total") == 0
