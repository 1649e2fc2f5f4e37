import http.client
import json
from importlib.util import find_spec

import pytest

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed here")


def probe(host: str, port: int, path: str, *, method: str = "GET") -> tuple[int, str]:
    """Return the HTTP status of an answer, and its `status` field."""
    connection = http.client.HTTPConnection(host, port, timeout=10.0)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
        return answer.status, json.loads(body).get("status", "") if body else ""
    finally:
        connection.close()
