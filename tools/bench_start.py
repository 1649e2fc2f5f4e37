"""Measure the seconds from `negamax serve nano` to the first streamed token, over several starts.

python tools/bench_start.py [--starts 3] [--json FILE]
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from negamax.base.env import usable_cores

TIMEOUT_SECONDS = 120.0
MESSAGES = [{"role": "user", "content": "Hello!"}]
BODY = {"model": "nano", "messages": MESSAGES, "stream": True, "max_tokens": 16}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def first_token_seconds(port: int) -> float:
    """Start a server, send a request as soon as it listens, and stop it."""
    started = time.perf_counter()
    words = f"-m negamax serve nano --port {port} --log-level warning"
    server = subprocess.Popen([sys.executable, *words.split()])
    try:
        while time.perf_counter() - started < TIMEOUT_SECONDS:
            try:
                url = f"http://127.0.0.1:{port}/v1/chat/completions"
                with httpx.stream("POST", url, json=BODY, timeout=TIMEOUT_SECONDS) as answer:
                    for line in answer.iter_lines():
                        chunk = json.loads(line[6:]) if line.startswith("data: {") else None
                        if chunk and "reasoning" in chunk["choices"][0]["delta"]:
                            return time.perf_counter() - started
            except httpx.ConnectError:
                time.sleep(0.02)
        raise SystemExit(f"no token within {TIMEOUT_SECONDS:.0f} s")
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seconds = [first_token_seconds(free_port()) for _ in range(args.starts)]
    report = {"cores": usable_cores(), "seconds_to_first_token": seconds}
    report["median"] = statistics.median(seconds)
    shown = ", ".join(f"{each:.2f}" for each in seconds)
    print(f"first token after {report['median']:.2f} s (median of {args.starts}: {shown})")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
