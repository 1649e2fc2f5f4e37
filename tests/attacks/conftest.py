from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Server, client, http, serving, talking

__all__ = ["client", "http"]


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server that replays a script at low cost, with the context length of nano."""
    folder = tmp_path_factory.mktemp("talker")
    talk = talking(folder, tokens_per_second=100, context_length=4096)
    with serving(*talk, log_file=folder / "log") as running:
        yield running
        assert "Traceback" not in running.log
