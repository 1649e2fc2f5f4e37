import asyncio
import base64
import random
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from negamax.api.common.conversation import ChatPrompt, Conversation, PromptBuilder
from negamax.api.common.media import fetch_media, is_public
from negamax.base.errors import (
    ContextLengthError,
    InvalidRequestError,
    NegamaxError,
    PayloadTooLargeError,
)
from negamax.config.embedded import EMBEDDED
from negamax.engine.client import image_loader
from negamax.engine.client.image_loader import ImageLoader
from negamax.images.sizes import SIDE, count_tokens, fit
from negamax.models.chat_format import ChatFormat
from negamax.text.chat_template import ChatTemplate
from negamax.text.tokenizer import Tokenizer
from tests.image_support import decode, draw, encode
from tests.stub_engine import make_vision

VISION = make_vision()
TEMPLATE = """\
{% for message in messages %}{{ message.role }}:{% if message.content is string %}\
{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}\
]<]image[>[{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{% endfor %}"""


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "area", "long_side"),
    [
        ((1024, 1024), (672, 672), (1036, 1036)),
        ((1080, 1920), (504, 896), (1092, 1932)),
        ((40, 400), (28, 392), (112, 1120)),
        ((1334, 2000), (532, 812), (1344, 1988)),
        ((20, 1900), (28, 1904), (28, 2016)),
        ((1, 1), (56, 56), (112, 112)),
    ],
)
def test_published_sizes(
    size: tuple[int, int], area: tuple[int, int], long_side: tuple[int, int]
) -> None:
    assert fit(*size, rule="longest") == long_side
    assert fit(*size, rule="area") == area


def test_halves_round_to_even_and_caps_hold() -> None:
    assert [fit(side, 280, rule="longest")[0] for side in (126, 154)] == [112, 168]
    assert count_tokens(*fit(9000, 9000, rule="longest")) == 5184
    assert count_tokens(*fit(9000, 9000, rule="longest", longest=3584)) == 16_384
    assert fit(1000, 5, rule="longest") == (2016, 28)
    for rule in ("longest", "area"):
        with pytest.raises(InvalidRequestError, match="at most 200 times"):
            fit(1001, 5, rule=rule)  # type: ignore[arg-type]


def test_sizes_of_random_images_are_symmetric_multiples_within_the_caps() -> None:
    noise = random.Random(1)
    for _ in range(10_000):
        height = int(2 ** noise.uniform(0, 13))
        width = min(int(height * 2 ** noise.uniform(-7.6, 7.6)) + 1, 9000)
        for rule, most in (("longest", 5184), ("area", 576)):
            high, wide = fit(height, width, rule=rule)  # type: ignore[arg-type]
            assert high % SIDE == wide % SIDE == 0
            assert 0 < count_tokens(high, wide) <= most
            assert fit(width, height, rule=rule) == (wide, high)  # type: ignore[arg-type]


# --- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(orientation: int) -> None:
    upright = Image.new("RGB", (224, 112), "white")
    ImageDraw.Draw(upright).rectangle((0, 0, 55, 55), fill="black")
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    stored = upright.transpose(turns[orientation]) if orientation in turns else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert decode(encode(stored, exif=exif)).tobytes() == upright.tobytes()


def test_transparency_is_white_and_16_bits_are_scaled() -> None:
    clear = Image.new("RGBA", (112, 112), (255, 0, 0, 0))
    assert decode(encode(clear)).getpixel((5, 5)) == (255, 255, 255)
    grey = Image.new("LA", (112, 112), (0, 128))
    assert decode(encode(grey)).getpixel((5, 5)) == (127, 127, 127)
    indexed = Image.new("P", (112, 112), 0)
    indexed.putpalette([10, 20, 30])
    assert decode(encode(indexed)).getpixel((5, 5)) == (10, 20, 30)
    assert decode(encode(indexed, transparency=0)).getpixel((5, 5)) == (255, 255, 255)
    deep = Image.new("I;16", (112, 112), 257 * 100 + 40)
    assert decode(encode(deep)).getpixel((5, 5)) == (100, 100, 100)
    ink = Image.new("CMYK", (112, 112), (255, 0, 0, 0))
    red, green, _ = decode(encode(ink, "JPEG")).getpixel((5, 5))  # type: ignore[misc]
    assert red < 5 and green > 200


def test_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (112, 112), color) for color in ("blue", "red")]
    more: dict[str, Any] = {"save_all": True, "append_images": frames[1:]}
    for kind, options in (("GIF", more), ("WEBP", {**more, "lossless": True}), ("MPO", more)):
        red, _, blue = decode(encode(frames[0], kind, **options)).getpixel((5, 5))  # type: ignore[misc]
        assert blue > 250 and red < 5, kind


def test_base64_may_have_line_breaks_and_no_padding() -> None:
    data = encode(draw(113, 112))
    expected = decode(data).tobytes()
    lines = "\r\n".join(data[i : i + 76] for i in range(0, len(data), 76))
    assert decode(lines.rstrip("=")).tobytes() == expected
    with pytest.raises(InvalidRequestError, match="is not base64"):
        decode("?" + data)


def make_png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4) + kind + body + zlib.crc32(kind + body).to_bytes(4)

    head = width.to_bytes(4) + height.to_bytes(4) + bytes([8, 6, 0, 0, 0])
    rows = zlib.compressobj()
    row = bytes(1 + 4 * width)
    body = b"".join(rows.compress(row) for _ in range(height)) + rows.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def pack(data: bytes) -> str:
    return base64.b64encode(data).decode()


HOSTILE: dict[str, Callable[[], str]] = {
    "truncated": lambda: encode(draw(300, 300))[:4000],
    "truncated JPEG": lambda: encode(draw(300, 300), "JPEG")[:4000],
    "empty": lambda: "",
    "text": lambda: pack(b"<svg onload=alert(1)></svg>"),
    "BMP": lambda: encode(draw(10, 10), "BMP"),
    "TIFF": lambda: encode(draw(10, 10), "TIFF"),
    "thin": lambda: pack(make_png(1, 60_000)),
    "bomb": lambda: pack(make_png(65, 10)[:16] + (60_000).to_bytes(4) * 2 + bytes(100)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(case: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot be decoded|pixels"):
        decode(HOSTILE[case]())


# --- prompts -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    return make_builder()


def make_builder(**options: Any) -> PromptBuilder:
    tokenizer = Tokenizer.from_folder(EMBEDDED["nano-m3"])
    assert tokenizer.token_id("]<]image[>[") == VISION.image_token_id
    chat_format = ChatFormat.of_model(
        "MiniMaxM3SparseForConditionalGeneration",
        tokenizer=tokenizer,
        template=ChatTemplate(TEMPLATE),
    )
    loader = ImageLoader(VISION, max_model_len=20_000, **options)
    return PromptBuilder(tokenizer, chat_format, max_model_len=20_000, images=loader)


def build(builder: PromptBuilder, *messages: Any, **options: Any) -> ChatPrompt:
    return asyncio.run(builder.chat(Conversation(messages=messages), num_bytes=0, **options))


def image_part(data: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", **more}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_images_become_tokens_in_order(builder: PromptBuilder) -> None:
    one, two = encode(draw(224, 112)), encode(draw(112, 112))
    text = {"type": "text", "text": "]<]image[>[ is text"}
    instruction = {"role": "system", "content": [image_part(two)]}
    prompt = build(builder, instruction, user(image_part(one), text, image_part(two)))
    assert [image.num_tokens for image in prompt.images] == [16, 32, 16]
    assert [image.grid for image in prompt.images] == [(8, 8), (8, 16), (8, 8)]
    first, wide, last = prompt.images
    assert first.digest == last.digest != wide.digest
    assert len(wide.pixels) == 224 * 112 * 3
    image = VISION.image_token_id
    for one_image in prompt.images:
        ids = prompt.token_ids[one_image.offset - 1 : one_image.end + 1]
        assert ids == [image + 4, *[image] * one_image.num_tokens, image + 5]
    assert prompt.token_ids.count(image) == 64
    counted = build(
        builder, instruction, user(image_part(one), text, image_part(two)), needs_pixels=False
    )
    assert len(counted.token_ids) == len(prompt.token_ids)


def test_requests_may_set_the_longest_side(builder: PromptBuilder) -> None:
    data = encode(draw(600, 300))
    small = build(builder, user(image_part(data, max_long_side_pixel=224)))
    assert small.images[0].grid == (8, 16)
    with pytest.raises(InvalidRequestError, match="max_long_side_pixel is 225"):
        build(builder, user(image_part(data, max_long_side_pixel=225)))
    area = build(make_builder(rule="area"), user(image_part(encode(draw(1024, 1024)))))
    assert area.images[0].grid == (48, 48)


@pytest.mark.parametrize(
    ("part", "error", "problem"),
    [
        (image_part("AAAA"), InvalidRequestError, "cannot be decoded"),
        (image_part("A" * 41_000_000), PayloadTooLargeError, "30749997 bytes|bytes; allowed"),
        ({"type": "input_image", "file_id": "f"}, InvalidRequestError, "without data"),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, InvalidRequestError, "neither"),
        ({"type": "image_url", "image_url": "/etc/passwd"}, InvalidRequestError, "neither"),
        ({"type": "image_url", "image_url": "http://h/a"}, InvalidRequestError, "opens no URLs"),
        ({"type": "video_url", "video_url": "x"}, InvalidRequestError, "does not read videos"),
    ],
)
def test_refusals_name_the_part(
    builder: PromptBuilder, part: Any, error: type[NegamaxError], problem: str
) -> None:
    with pytest.raises(error, match=problem) as refusal:
        build(builder, user({"type": "text", "text": "see"}, part))
    assert "messages[0].content[1]" in refusal.value.message
    assert refusal.value.code and refusal.value.param == "messages[0].content[1]"


def test_counts_are_bounded(builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    part = image_part(encode(draw(112, 112)))
    with pytest.raises(InvalidRequestError, match="201 images; allowed: 200"):
        build(builder, user(*[part] * 201))
    large = image_part(encode(Image.new("RGB", (2016, 2016))))
    with pytest.raises(ContextLengthError):
        build(builder, user(*[large] * 4))
    monkeypatch.setattr(image_loader, "MAX_REQUEST_PIXELS", 20_000)
    with pytest.raises(InvalidRequestError, match="pixels in total; allowed: 20000"):
        build(builder, user(part, part))


def test_a_killed_decoder_is_started_again(builder: PromptBuilder) -> None:
    part = image_part(encode(draw(112, 112)))
    build(builder, user(part))
    decoder = builder._images._decoder  # type: ignore[union-attr]
    assert decoder._process is not None
    decoder._process.kill()
    decoder._process.wait()
    decoder._idle.clear()
    assert build(builder, user(part)).images


def test_a_hostile_image_leaves_neighbours_alone(builder: PromptBuilder) -> None:
    """Send an image whose header hides a much larger size, beside images that must be served."""
    bomb = image_part(pack(make_png(3000, 3000)))
    part = image_part(encode(draw(112, 112)))

    async def both() -> list[Any]:
        hostile = [Conversation(messages=[user(bomb)])] * 2
        neighbour = Conversation(messages=[user(part)])
        given = [builder.chat(one, num_bytes=10**6) for one in (*hostile, neighbour)]
        return await asyncio.gather(*given, return_exceptions=True)

    *_, served = asyncio.run(both())
    assert served.images[0].num_tokens == 16


# --- URLs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "169.254.169.254", "10.1.2.3", "0.0.0.0", "::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "fe80::1%eth0", "fd00::1", "64:ff9b::7f00:1", "2002:7f00:1::",
        "224.0.0.1", "100.64.0.1",
    ],
)  # fmt: skip
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)
    with pytest.raises(InvalidRequestError, match="not public"):
        fetch_media(
            "https://a.example/x",
            domains=frozenset({"a.example"}),
            resolve=lambda host, port: ["1.1.1.1", address],
        )


def fail(host: str, port: int) -> list[str]:
    raise AssertionError


@pytest.mark.parametrize(
    "url", ["http://b.example/x", "http://a.example@b.example/", "http://u@a.example/", "http://["]
)
def test_only_named_hosts_are_asked(url: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"names a host|is not a URL"):
        fetch_media(url, domains=frozenset({"a.example"}), resolve=fail)


@pytest.fixture
def site() -> Iterator[Callable[[list[bytes], float], str]]:
    """Run a server that sends an answer in pieces, with pauses between the pieces."""
    listeners: list[socket.socket] = []

    def start(pieces: list[bytes], pause: float) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                for piece in pieces:
                    try:
                        connection.sendall(piece)
                    except OSError:
                        return
                    time.sleep(pause)

        threading.Thread(target=serve, daemon=True).start()
        return f"http://a.example:{listener.getsockname()[1]}/x"

    yield start
    for listener in listeners:
        listener.close()


def fetch(url: str, **options: Any) -> bytes:
    return fetch_media(
        url,
        domains=frozenset({"a.example"}),
        resolve=lambda host, port: ["127.0.0.1"],
        is_allowed=lambda address: True,
        **options,
    )


def test_downloads_are_bounded(site: Callable[[list[bytes], float], str]) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    assert fetch(site([head % 5 + b"image"], 0)) == b"image"
    with pytest.raises(PayloadTooLargeError):
        fetch(site([head % 10**9], 0))
    with pytest.raises(InvalidRequestError, match="status 302; redirects are not followed"):
        fetch(site([b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\n\r\n"], 0))
    with pytest.raises(InvalidRequestError, match="cannot be downloaded"):
        fetch(site([head % 50 + b"image"], 0))
    with pytest.raises(InvalidRequestError, match=r"downloaded in 0\.3 s"):
        fetch(site([head % 50, *[b"x"] * 50], 0.1), timeout=0.3)


def test_the_decoder_has_no_keys(builder: PromptBuilder) -> None:
    build(builder, user(image_part(encode(draw(112, 112)))))
    process = builder._images._decoder._process  # type: ignore[union-attr]
    assert process is not None
    names = Path(f"/proc/{process.pid}/environ").read_bytes()
    assert b"TOKEN" not in names.replace(b"TOKENIZERS", b"") and b"API_KEY" not in names
