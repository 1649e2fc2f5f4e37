"""What the client of `negamax bench serve` costs itself: streams from a trivial server in a process
of its own.

    python tools/bench_serve_client.py                                     # as fast as it can
    python tools/bench_serve_client.py --interval-ms 20 --tokens 250       # paced: what the gaps
    measure at a known rate

The server sends prepared chunks, so the figure is the ceiling of the client: a server that sends
more tokens per second than this cannot be measured by one client process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time

from negamax.bench import serve, serve_report
from negamax.bench.serve_options import CHAT, BenchOptions

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(**fields: object) -> bytes:
    """One event in an HTTP chunk of its own, as large as those of real servers."""
    answer = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1700000000,
    }
    data = (
        f"data: "
        f"{json.dumps(answer | {'model': 'trivial', 'system_fingerprint': 'fp_0'} | fields)}\n\n"
    ).encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def delta(content: str | None, finish_reason: str | None = None) -> bytes:
    """A chunk with `content`."""
    choice = {
        "index": 0,
        "delta": {"content": content},
        "logprobs": None,
        "finish_reason": finish_reason,
    }
    return event(choices=[choice], usage=None)


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, interval: float
) -> None:
    """Answer the requests of one connection."""
    token = delta(" token")
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
            body = json.loads(await reader.readexactly(length) or b"{}")
            if head.startswith(b"GET"):
                models = json.dumps({"object": "list", "data": [{"id": "trivial"}]}).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(models), models)
                )
                continue
            tokens = body["max_tokens"]
            if not body.get("stream"):
                usage = json.dumps(
                    {"usage": {"prompt_tokens": len(json.dumps(body)) // 4}}
                ).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(usage), usage)
                )
                continue
            writer.write(HEAD)
            begin = time.perf_counter()
            for number in range(tokens):
                writer.write(token)
                if interval:
                    await asyncio.sleep(
                        max(0.0, begin + (number + 1) * interval - time.perf_counter())
                    )
                else:
                    await asyncio.sleep(0)
                    await writer.drain()
            usage_fields = {
                "prompt_tokens": 10,
                "completion_tokens": tokens,
                "total_tokens": tokens + 10,
            }
            writer.write(
                delta(None, "length")
                + event(choices=[], usage=usage_fields)
                + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
            )
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def serve_trivially(interval: float) -> None:
    """Serve on a free port, named on standard output, until killed."""
    server = await asyncio.start_server(
        lambda r, w: answer(r, w, interval=interval), "127.0.0.1", 0
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--interval-ms", type=float, default=0.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve_trivially(given.interval_ms / 1e3))
    command = [sys.executable, __file__, "--serve", "--interval-ms", str(given.interval_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        options = BenchOptions(
            port=int(server.stdout.readline()),
            endpoint=CHAT,
            num_prompts=given.streams,
            random_input_len=20,
            random_output_len=given.tokens,
        )
        cpu = time.process_time()
        measured = serve.run(options, serve.RunProgress())
        cpu = time.process_time() - cpu
        server.terminate()
    summary = serve_report.summarize(measured, options)
    print(serve_report.block(summary, options))
    chunks = summary["total_output_tokens"]
    print(
        f"{1e6 * cpu / chunks:.1f} us of client CPU per token: at most {chunks / cpu:,.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
