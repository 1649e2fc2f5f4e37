"""Kill and stop each part of a server, and measure the effect on its clients.

    python tests/attacks/fault_table.py [--only TEXT] [--limit SECONDS]

Each part is killed (SIGKILL) or stopped (SIGSTOP, then SIGCONT) while the server is idle, reads
prompts, generates, or compiles a grammar. The link to another machine is also broken: both ways,
one way, and briefly. Network namespaces, which need root, act as other machines.

A cell shows three times in seconds: until open requests ended with an error, until /readyz was
not 200, and until a request was answered again. Clients "go on" if they only waited. With two
replicas, clients of the healthy one must go on, and /readyz must stay 200. If the prefilling
server of a router is killed or stopped, its clients must go on, /readyz must stay 200, and the
decoding server must answer new requests alone. The exit code is 1 if a number is above its limit.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from negamax.options.nodes import KEY_VARIABLE  # noqa: E402
from tests.dist.machines import Agent, DistantMachines, machines  # noqa: E402
from tests.e2e.test_disaggregation import exchange  # noqa: E402
from tests.ports import free_port  # noqa: E402
from tools.load.http import DONE, UnexpectedStatusError  # noqa: E402
from tools.load.server import Server, serving, start  # noqa: E402

CHAT = "/v1/chat/completions"
REPORTED_LIMIT, RED_LIMIT = 2.0, 1.0  # seconds
NODE_LIMIT = 3.0  # limit of both agents, if another machine does not answer
CLIENTS = 3  # With two cores, a tenant has at most three workers for slow grammars.
# A stopped grammar process and a killed decoding server are noticed after the prompt has run.
PREFILL_SECONDS = 8.0
# The router probes each server every second. A stopped server's probe fails after 5 s.
ROUTED_RED_LIMITS = {"killed": 2.0, "stopped": 7.0}
POLL_SECONDS = 0.05
PROBE_SECONDS = 0.8  # A later answer of /readyz counts as no answer.
STOPPED_SECONDS = 10.0
STATES = ("idle", "prefill", "decode", "opening")
ENGINE, GRAMMAR = "negamax.engine.core.process", "negamax.engine.grammar.process"
RANK, SERVER_WORKER = "negamax.worker.rank_process", "negamax.api.server_worker"
# Experts move continuously, 160 moves in 200 steps.
MOVING = (
    *("--enable-expert-parallel", "--enable-eplb"),
    *("--eplb-config", '{"step_interval": 1, "window_size": 1, "num_redundant_experts": 2}'),
)
PREFILLER, DECODER, ROUTER = "prefilling server", "decoding server", "router"
ROLES = {PREFILLER: "kv_producer", DECODER: "kv_consumer"}
ROUTED = (*ROLES, ROUTER)
SMALL_TIER = ("--kv-offloading-size", "0.01")  # room for 2,096 tokens
# name, options, number of server processes, and parts
SETUPS: tuple[tuple[str, tuple[str, ...], int, tuple[str, ...]], ...] = (
    ("one process", (), 1, ("server process", "engine", "grammar process")),
    ("two server processes", (), 2, ("leader", "server process", "engine")),
    ("tp 2", ("-tp", "2"), 1, ("engine", "rank 0", "rank 1")),
    ("tp 2, experts move", ("-tp", "2", *MOVING), 1, ("rank 1",)),
    ("dp 2", ("-dp", "2"), 1, ("engine", "rank 0", "rank 1")),
    ("two replicas", ("--num-replicas", "2"), 1, ("replica 1",)),
    ("two machines, pp 2", ("-pp", "2", "--nnodes", "2"), 1, ("engine", "node 1")),
    ("two distant machines, pp 2", ("-pp", "2", "--nnodes", "2"), 1, ("node 1",)),
    ("prefill and decode", (), 1, ROUTED),
    ("full host tier", SMALL_TIER, 1, ("engine",)),
)
DISTANCE = {"delay": 0.02, "jitter": 0.005, "loss": 0.01}  # links between distant machines
GAP_SECONDS = 1.4  # length of a gap; an interruption of more than 2 s counts as a fault
GAP = f"gap of {GAP_SECONDS} s"
MACHINE_FAULTS = ("link down", "hears nothing", "is not heard", GAP)
# The pause after a fault must not grow with the number of earlier faults.
OPTIONS = ("--max-engine-restarts", "1000", "--engine-restart-window", "1")
BOTH_WAYS = ((0, 1), (1, 0))


@dataclass
class Client:
    events: list[float] = field(default_factory=list)  # monotonic seconds
    ended: float | None = None
    error: str | None = None  # the error that ended the client
    is_bystander: bool = False  # whether the client uses the healthy replica
    task: asyncio.Task[None] = field(init=False)

    async def run(self, server: Server, body: dict[str, Any]) -> None:
        connection = server.connection()
        try:
            async for payload in connection.stream(CHAT, body):
                self.events.append(time.monotonic())
                if payload != DONE and "error" in json.loads(payload):
                    self.error = "an error event"
        except UnexpectedStatusError as error:
            self.error = f"status {error.status}"
        except (OSError, ValueError, asyncio.IncompleteReadError):
            self.error = "the connection broke"
        finally:
            self.ended = self.ended or time.monotonic()
            connection.hang_up()

    def outcome(self, since: float) -> str:
        if self.ended is not None:
            return "reported" if self.error else "goes on"
        return "goes on" if self.events and self.events[-1] > since + 0.5 else "waits"


@dataclass
class Cell:
    """Hold the effect of a fault, in seconds since the fault. None means later than the limit."""

    limit: float  # of `reported`
    reported: float | None = None
    goes_on: bool = False  # whether every client went on
    harms_bystanders: bool = False
    red: float | None = None
    again: float | None = None  # seconds since the fault, or since it was undone


# starts the fault, and undoes it after all clients have noticed it
Fault = tuple[Callable[[], object], Callable[[], object] | None]


class OtherNode:
    def __init__(self, network: DistantMachines, options: tuple[str, ...]) -> None:
        self.network = network
        self._options = options
        self.start()

    def start(self) -> None:
        self.agent = Agent(self.network, 1, *self._options, "--log-level", "warning")

    def faults(self, part: str) -> dict[str, Fault]:
        def cut(*ways: tuple[int, int]) -> Fault:
            return lambda: self._cut(True, ways), lambda: self._cut(False, ways)

        def open_gap() -> None:
            self._cut(True, BOTH_WAYS)
            threading.Timer(GAP_SECONDS, self._cut, (False, BOTH_WAYS)).start()

        return signal_faults(self.agent.signal, undo_kill=None) | {
            "killed": (self.agent.kill, self.start), "link down": cut(*BOTH_WAYS),
            "hears nothing": cut((0, 1)), "is not heard": cut((1, 0)), GAP: (open_gap, None),
        }  # fmt: skip

    def _cut(self, is_cut: bool, ways: tuple[tuple[int, int], ...]) -> None:
        for source, target in ways:
            self.network.set_links(source=source, target=target, cut=is_cut)


class RoutedServers:
    """Run a prefilling server, a decoding server and their router."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._ports = {part: str(free_port()) for part in ROUTED}
        self.servers = {part: self.start(part) for part in ROUTED}

    def start(self, part: str) -> Server:
        port = ("--port", self._ports[part])
        if part == ROUTER:
            urls = [f"http://127.0.0.1:{self._ports[each]}" for each in ROLES]
            line = ("route", *port, "--prefill", urls[0], "--decode", urls[1])
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = start("negamax", *line, text=True, cwd=ROOT, **pipes)
            self._stack.callback(process.kill)
            return Server(process, Path(os.devnull))
        transfer = exchange(ROLES[part], free_port(), kv_load_failure_policy="recompute")
        line = (*OPTIONS, *port, "--kv-offloading-size", "0.1", transfer)
        server = self._stack.enter_context(serving(*line))
        self._stack.callback(send_to, all_pids(server), signal.SIGCONT)
        return server

    def faults(self, part: str) -> dict[str, Fault]:
        """Return faults of all processes of a server. A killed server is started again."""
        send = partial(send_to, all_pids(self.servers[part]))
        return signal_faults(send, undo_kill=partial(self.start, part))


def signal_faults(
    send: Callable[[signal.Signals], object], *, undo_kill: Callable[[], object] | None
) -> dict[str, Fault]:
    kill, stop, resume = (
        partial(send, each) for each in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)
    )
    return {"killed": (kill, undo_kill), "stopped": (stop, resume)}


def send_to(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


Others = OtherNode | RoutedServers | None


def faults_of(server: Server, part: str, others: Others) -> dict[str, Fault]:
    if others is not None and part != "engine":
        return others.faults(part)
    return signal_faults(partial(send_to, [pid_of(server, part)]), undo_kill=None)


def all_pids(server: Server) -> list[int]:
    return [server.process.pid, *descendants(server.process.pid, "")]


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):  # Each thread has a list of children.
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return sorted(found)


def descendants(pid: int, module: str) -> list[int]:
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):
            if module in Path(f"/proc/{child}/cmdline").read_text():
                found.append(child)
        found += descendants(child, module)
    return found


def pid_of(server: Server, part: str) -> int:
    root = server.process.pid
    if part == "leader" or (part == "server process" and not descendants(root, SERVER_WORKER)):
        return root
    modules = {"engine": ENGINE, "grammar": GRAMMAR, "server": SERVER_WORKER, "replica": ENGINE}
    kind, _, number = part.partition(" ")
    place = int(number) if number.isdigit() else int(kind == "grammar")  # The first process forks.
    return descendants(root, modules.get(kind, RANK))[place]


def replica_of(part: str) -> int | None:
    return int(part[-1]) if part.startswith("replica") else None


def body_for(
    state: str, *, constrained: bool, nonce: int, replica: int | None = None
) -> dict[str, Any]:
    """Make a request that keeps the server in `state`. `constrained` adds a grammar."""
    text = f"{nonce} " * (250 if state == "prefill" else 1)  # 1,786 tokens
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "stream": True}
    body |= {"max_tokens": 1500, "ignore_eos": True, "routed_dp_rank": replica}
    if state == "opening":  # The compiler needs about a second for this grammar.
        names = {f"p{nonce}_{index}": {"type": "integer"} for index in range(100)}
        schema = {"type": "object", "properties": names, "minProperties": 25}
        named = {"name": "slow", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    elif constrained:
        body["structured_outputs"] = {"regex": "[a-z ]{1400}"}
    return body


async def status(server: Server, path: str, body: Any = None, *, seconds: float) -> int:
    connection = server.connection()
    try:
        sent = connection.get(path) if body is None else connection.post(path, body)
        return (await asyncio.wait_for(sent, seconds)).status
    except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
        return 0
    finally:
        connection.hang_up()


async def first_red(server: Server, since: float, limit: float) -> float | None:
    while time.monotonic() < since + limit:
        if await status(server, "/readyz", seconds=PROBE_SECONDS) != 200:
            return time.monotonic() - since
        await asyncio.sleep(POLL_SECONDS)
    return None


async def first_answer(server: Server, part: str, since: float, limit: float) -> float | None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 1, "routed_dp_rank": replica_of(part)}
    if part == "grammar process":
        body["structured_outputs"] = {"choice": ["yes", "no"]}
    while time.monotonic() < since + limit:
        if await status(server, CHAT, body, seconds=5.0) == 200:
            return time.monotonic() - since
        await asyncio.sleep(POLL_SECONDS)
    return None


async def wait_for(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return holds()


async def enter(server: Server, state: str, *, part: str, nonce: int) -> list[Client]:
    constrained = part == "grammar process"
    if constrained:
        await first_answer(server, part, time.monotonic(), 30.0)  # This starts the process.
    clients = [Client() for _ in range(0 if state == "idle" else CLIENTS)]
    harmed = replica_of(part)
    for number, client in enumerate(clients):
        replica = None if harmed is None else number % 2
        client.is_bystander = replica != harmed
        body = body_for(state, constrained=constrained, nonce=nonce + number, replica=replica)
        client.task = asyncio.create_task(client.run(server, body))
    if state == "decode":
        await wait_for(lambda: all(len(client.events) > 4 for client in clients), 20.0)
    elif state == "opening":
        await wait_for(lambda: len(descendants(server.process.pid, GRAMMAR)) > 1, 10.0)
        await asyncio.sleep(0.5)
    elif state == "prefill":
        await asyncio.sleep(0.1)
    if ended := [client.error for client in clients if client.ended is not None]:
        raise RuntimeError(f"clients ended before the fault: {ended}")
    return clients


async def measure(
    server: Server, part: str, state: str, *, name: str, others: Others, limit: float
) -> Cell:
    clients = await enter(server, state, part=part, nonce=time.monotonic_ns() % 10**6)
    strike, undo = faults_of(server, part, others)[name]
    since = time.monotonic()
    strike()
    if state == "idle":  # A request arrives before the fault is noticed.
        clients.append(Client())
        is_constrained = part == "grammar process"
        body = body_for("decode", constrained=is_constrained, nonce=1, replica=replica_of(part))
        clients[-1].task = asyncio.create_task(clients[-1].run(server, body))
    red = asyncio.create_task(first_red(server, since, STOPPED_SECONDS if undo else limit))
    is_late = state == "prefill" and part in ("grammar process", DECODER)
    reported_limit = NODE_LIMIT if isinstance(others, OtherNode) else REPORTED_LIMIT
    cell = Cell(reported_limit + is_late * PREFILL_SECONDS)
    back = since
    if part == PREFILLER:  # The decoding server answers during the fault.
        cell.again = await first_answer(server, part, since, limit)
    if undo is not None:
        settled = all_settled(clients, since)
        await wait_for(lambda: settled() and red.done(), since + STOPPED_SECONDS - time.monotonic())
        back = time.monotonic()
        await asyncio.to_thread(undo)
    if part != PREFILLER:
        cell.again = await first_answer(server, part, back, limit)
    await wait_for(all_settled(clients, back), max(0.0, back + limit - time.monotonic()))
    reported = [client for client in clients if client.outcome(back) == "reported"]
    if all(client.outcome(back) != "waits" for client in clients):
        cell.goes_on = not reported
        cell.harms_bystanders = any(client.is_bystander for client in reported)
        cell.reported = (
            max((client.ended or since) - since for client in reported) if reported else None
        )
    if red.done():
        cell.red = red.result()
    red.cancel()
    for client in clients:
        client.task.cancel()
    await asyncio.gather(red, *(client.task for client in clients), return_exceptions=True)
    return cell


def all_settled(clients: list[Client], since: float) -> Callable[[], bool]:
    """Return a check that no client waits. A client that goes on shows progress within a second."""
    return lambda: (
        time.monotonic() > since + 1.0
        and all(client.outcome(since) != "waits" for client in clients)
    )


def text_of(cell: Cell, part: str, *, fault: str, restart: float) -> tuple[str, bool]:
    is_front = part in ("server process", "leader")
    # Other server processes, grammar processes and replicas keep answering.
    is_replica = replica_of(part) is not None
    has_others = is_front or is_replica or part == "grammar process"
    is_harmless = fault == GAP or part == PREFILLER  # Clients go on, and /readyz stays 200.
    red_limit = NODE_LIMIT if part.startswith("node") else RED_LIMIT
    red_limit = ROUTED_RED_LIMITS[fault] if part == DECODER else red_limit
    parts = [
        ("goes on", True) if cell.goes_on else _number(cell.reported, cell.limit),
        _number(cell.red, red_limit, optional=has_others or is_harmless),
        _number(cell.again, restart),
    ]
    if cell.harms_bystanders or (is_replica and cell.red is not None):
        parts.append(("**others, too**", False))
    if is_harmless and not (cell.goes_on and cell.red is None):
        parts.append(("**no cause**", False))
    return " / ".join(text for text, _ in parts), all(good for _, good in parts)


def _number(seconds: float | None, limit: float, *, optional: bool = False) -> tuple[str, bool]:
    if seconds is None:
        return ("green", True) if optional else ("**never**", False)
    return (f"{seconds:.1f}", True) if seconds <= limit else (f"**{seconds:.1f}**", False)


@contextlib.contextmanager
def started(
    options: tuple[str, ...], num_servers: int, *, links: dict[str, float], is_routed: bool
) -> Iterator[tuple[Server, Others, float]]:
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        if is_routed:
            routed = RoutedServers(stack)
            yield routed.servers[ROUTER], routed, time.monotonic() - began
            return
        node = None
        if "--nnodes" in options:
            network = stack.enter_context(machines(2, DistantMachines))
            network.set_links(**links)
            node = OtherNode(network, options)
            stack.callback(lambda: node.agent.kill())
            options = (*options, "--master-addr", network.address(0))
        began = time.monotonic()
        server = stack.enter_context(serving(*OPTIONS, *options, num_servers=num_servers))
        start_seconds = time.monotonic() - began
        if options == SMALL_TIER:
            asyncio.run(fill_tier(server))
        try:
            yield server, node, start_seconds
        finally:
            send_to(all_pids(server), signal.SIGCONT)


async def fill_tier(server: Server) -> None:
    """Send prompts until main memory evicts blocks."""
    for nonce in range(10):
        body = body_for("prefill", constrained=False, nonce=10**6 + nonce) | {"max_tokens": 1}
        await status(server, CHAT, body, seconds=60.0)
        if (await server.metrics())["negamax:kv_offload_evictions_total"]:
            return
    raise RuntimeError("main memory is not full")


def row(setup: str, part: str, *, fault: str, limit: float) -> tuple[list[str], bool]:
    options, num_servers = next(entry[1:3] for entry in SETUPS if entry[0] == setup)
    cells, good = [], True
    is_alone = part == "leader" or (part == "server process" and num_servers == 1)
    for state in STATES:
        if part in ROUTED and state == "opening":  # The effect is the same as in a prefill.
            cells.append("-")
            continue
        try:
            links = DISTANCE if "distant" in setup else {}
            servers = started(options, num_servers, links=links, is_routed=part in ROUTED)
            with servers as (server, others, start_seconds):
                measured = measure(server, part, state, name=fault, others=others, limit=limit)
                cell = asyncio.run(measured)
                restart = start_seconds + REPORTED_LIMIT
                if is_alone and fault == "killed" and server.process.poll() is not None:
                    cell.again = 0.0  # An external supervisor restarts the server.
                text, is_good = text_of(cell, part, fault=fault, restart=restart)
        except IndexError as error:  # The server has no such part.
            text, is_good = f"**{type(error).__name__}**", False
        cells.append(text)
        good &= is_good
        print(f"{setup}, {part}, {state}: {text}", file=sys.stderr, flush=True)
    return cells, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds after a fault")
    arguments = parser.parse_args()
    os.environ.setdefault(KEY_VARIABLE, "of the table")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # The server ends with this process.
    good = True
    print("| part | fault | " + " | ".join(STATES) + " |")
    print("|---|---|" + "---|" * len(STATES), flush=True)
    for setup, _, _, parts in SETUPS:
        for part in parts:
            for fault in ("killed", "stopped", *(MACHINE_FAULTS if part == "node 1" else ())):
                if arguments.only not in f"{setup}, {part}, {fault}":
                    continue
                cells, is_good = row(setup, part, fault=fault, limit=arguments.limit)
                good &= is_good
                print(f"| {setup}: {part} | {fault} | " + " | ".join(cells) + " |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
