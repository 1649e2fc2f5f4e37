import base64

import pytest

from negamax.api.playground import PAGE_PATHS, read_browser_key

OWN = (b"x-negamax-page", b"1")


def basic(text: str) -> tuple[bytes, bytes]:
    return b"authorization", b"Basic " + base64.b64encode(text.encode())


def test_the_password_counts_for_the_page_and_its_requests() -> None:
    assert {"/", "/playground/app.js", "/playground/style.css"} <= PAGE_PATHS
    for path in PAGE_PATHS:
        assert read_browser_key(path, [basic("anyone:the:kéy")]) == "the:kéy".encode()
    # Another site may have made the browser send this header.
    assert read_browser_key("/v1/models", [basic(":key")]) == b""
    assert read_browser_key("/v1/models", [basic(":key"), OWN]) == b"key"
    name, value = basic("a:key")
    assert read_browser_key("/", [(name, value.replace(b"Basic", b"bASIC"))]) == b"key"


@pytest.mark.parametrize(
    "value", [b"", b"Basic", b"Basic !", b"Basic a", b"Bearer a2V5", b"Basic a2V5", b"Basic \xff"]
)
def test_other_credentials_are_no_key(value: bytes) -> None:
    assert read_browser_key("/", [(b"authorization", value)]) == b""
