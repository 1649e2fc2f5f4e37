import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from negamax import LLM
from negamax.base.errors import ConfigError, EngineDeadError, UnavailableError
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine import wire
from negamax.engine.client.connection import EngineChannel
from negamax.engine.client.engine_client import AsyncEngine, SharedQueue
from negamax.engine.client.open_request import OpenRequest
from negamax.engine.client.placement import (
    NUM_COLUMNS,
    TAG_SHIFT,
    PrefixTable,
    ReplicaLoad,
    hash_blocks,
)
from negamax.engine.client.supervisor import check_same_device, make_replica_options
from negamax.engine.wire import AddRequest, EngineStats, RankStats
from negamax.options.engine import EngineOptions
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.scheduler import ROW_COST
from negamax.scheduler.step import SequenceUpdate
from tests.unit.test_open_request import in_loop
from tests.unit.test_stop_strings import INFO, TOKENIZER

BLOCK = 16


class Channel:
    def __init__(self, stats: EngineStats | None = None) -> None:
        self.is_open = True
        self.stats = stats
        self.last_beat = time.monotonic() + 1000
        self.rank, self.rank_silence = 0, 0.0
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def engine_of(
    count: int, *, ranks: int = 1, index: int = 0, queue: SharedQueue | None = None
) -> tuple[AsyncEngine, list[Channel]]:
    options = EngineOptions(model="nano", num_replicas=count)
    engine = AsyncEngine(options, tokenizer=TOKENIZER, chat_template=None, index=index, queue=queue)
    channels = [Channel() for _ in range(count)]
    for replica, channel in enumerate(channels):
        run(engine, replica, channel, ranks=ranks)
    return engine, channels


def run(engine: AsyncEngine, replica: int, channel: Channel, *, ranks: int = 1) -> None:
    sizes = {"num_kv_blocks": 1000, "max_num_seqs": 4, "max_model_len": 9000}
    known = replace(INFO, block_size=BLOCK, data_parallel_size=ranks, **sizes)
    engine.on_engine_ready(replica, cast(EngineChannel, channel), known)


def ask(
    engine: AsyncEngine, tokens: Sequence[int], name: str, *, rank: int | None = None
) -> tuple[OpenRequest, int]:
    request = engine.generate(
        tokens, SamplingParams(max_tokens=8), request_id=name, data_parallel_rank=rank
    )
    replica = engine.enter(request)
    request._replica, request._has_started = replica, True
    replica.send(*map(AddRequest, request.requests))
    return request, replica.index


def prompt(number: int, length: int = 40) -> list[int]:
    return [(7 * number + at) % 90 for at in range(length)]


def test_load_counts_open_sequences_of_all_server_processes() -> None:
    numbers = SharedNumbers(2 * NUM_COLUMNS, num_rows=2)
    mine, theirs = (ReplicaLoad(numbers, replica=1, index=index) for index in range(2))
    other = ReplicaLoad(numbers, replica=0, index=0)
    mine.enter("a", context=400, pending=300)
    theirs.enter("b", context=40, pending=40)
    assert mine.cost(10, num_ranks=1) == theirs.cost(10, num_ranks=1)
    assert mine.cost(10, num_ranks=1) == (10 + 340 + 2 * ROW_COST + 110, 440)
    assert mine.cost(10, num_ranks=2)[0] == 10 + (340 + 2 * ROW_COST + 110) / 2
    assert other.cost(10, num_ranks=1) == (10, 0)
    mine.gained([SequenceUpdate("a", [1]), SequenceUpdate("nobody's", [1])])
    assert mine.cost(0, num_ranks=1)[0] == 40 + 2 * ROW_COST + 110
    mine.gained([SequenceUpdate("a", [1])])
    for name in ("a", "a", "nobody's"):
        mine.leave(name)
    assert mine.cost(0, num_ranks=1)[0] == 40 + ROW_COST + 10
    theirs.leave("b")  # This request leaves before its first token.
    assert mine.cost(0, num_ranks=1) == (0, 440)


def test_sequences_of_a_dead_server_process_are_no_load(tmp_path: Path) -> None:
    queue = SharedQueue.of(2, num_servers=2, folder=tmp_path)
    loads = [ReplicaLoad(queue.loads, replica=0, index=server) for server in range(2)]
    for number, load in enumerate(loads):
        load.enter(f"r{number}", context=100, pending=100)
    queue.clear(1)
    assert loads[0].cost(0, num_ranks=1) == (100 + ROW_COST + 25, 100)


def test_prefixes_are_shared_by_processes_and_discarded(tmp_path: Path) -> None:
    here, there = (SharedQueue.of(2, num_servers=2, folder=tmp_path).prefixes for _ in range(2))
    table, theirs = PrefixTable(here), PrefixTable(there)
    for one in (table, theirs):
        for replica in range(2):
            one.resize(replica, num_blocks=1000)

    def tags(tokens: Sequence[int], salt: str = "") -> list[int]:
        return [one >> TAG_SHIFT for one in hash_blocks(tokens, block_size=BLOCK, salt=salt)]

    long = prompt(0, 100)
    assert len(tags(long)) == 6 and len(tags(long[:96])) == 5 and tags(long[:16]) == []
    theirs.add(tags(long), 1)
    assert table.matches(tags([*long, 1, 2, 3]), 1) == 6
    assert table.matches(tags(long[:50]), 1) == 3
    assert table.matches(tags([*long[:40], *prompt(5, 60)]), 1) == 2
    assert table.matches(tags([1, *long]), 1) == 0
    assert table.matches(tags(long, salt="other"), 1) == 0
    assert table.matches(tags(long), 0) == 0
    table.discard(1)
    assert theirs.matches(tags(long), 1) == 0
    # The table keeps at most as many blocks as the cache of a replica has.
    table.resize(0, num_blocks=8)
    table.add(tags(prompt(1, 100)), 0)
    for number in range(2, 30):
        table.add(tags(prompt(number, 200)), 0)
    assert table.matches(tags(prompt(1, 100)), 0) < 6


@in_loop
async def test_requests_are_spread_and_follow_their_prefixes_until_load_outweighs_them() -> None:
    engine, _ = engine_of(3)
    places = [ask(engine, prompt(10 * number), f"r{number}")[1] for number in range(9)]
    assert sorted(places) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    engine, _ = engine_of(2)
    first, place = ask(engine, prompt(0, 400), "first")
    first.close()
    second, again = ask(engine, [*prompt(0, 400), 5, 6], "second")
    assert again == place
    second.close()
    # Other requests fill this replica until another replica is cheaper, despite an empty cache.
    for number in range(12):
        assert ask(engine, prompt(50 + number), f"o{number}", rank=place)[1] == place
        _, chosen = ask(engine, [*prompt(0, 400), 9, number], f"p{number}")
        if chosen != place:
            break
    assert 0 < number < 12
    assert chosen == 1 - place


@in_loop
async def test_requests_alternate_between_replicas_unless_a_rank_is_named() -> None:
    engine, _ = engine_of(2)
    places = []
    for number in range(6):
        request, place = ask(engine, prompt(10 * number), f"r{number}")
        request.close()
        places.append(place)
    assert places == [0, 1, 0, 1, 0, 1]
    engine, channels = engine_of(2, ranks=2)
    assert engine.num_ranks == 4
    for rank in (3, 3, 3, 2, 0):
        request, place = ask(engine, prompt(rank), f"r{time.monotonic_ns()}", rank=rank)
        assert place == rank // 2
        assert request.requests[0].data_parallel_rank == rank % 2
    assert [len(channel.sent) for channel in channels] == [1, 4]
    assert ask(engine, prompt(1), "free")[0].requests[0].data_parallel_rank is None


@in_loop
async def test_dead_and_silent_replicas_get_nothing_while_others_run() -> None:
    engine, channels = engine_of(2)
    full = engine.admission._max_open
    lost, _ = ask(engine, prompt(1), "lost", rank=1)
    kept, _ = ask(engine, prompt(2), "kept", rank=0)
    channels[1].last_beat = 0.0
    assert engine.replicas[1].state == "silent"
    assert ask(engine, prompt(3), "r3")[1] == 0  # The silent replica is not chosen.
    channels[1].is_open = False
    engine.on_engine_lost(1, "killed", ready_in=7.0)
    assert isinstance(lost._failure, EngineDeadError) and kept._failure is None
    assert engine.admission._max_open == full - 4
    assert [ask(engine, prompt(20 + at), f"o{at}")[1] for at in range(4)] == [0] * 4
    with pytest.raises(UnavailableError, match=r"killed; the engine restarts") as refused:
        ask(engine, prompt(1), "pinned", rank=1)
    assert 6.0 < (refused.value.retry_after or 0) <= 7.0
    assert engine.num_open == 6
    channels[0].last_beat = 0.0
    assert ask(engine, prompt(30), "better than nothing")[1] == 0
    with pytest.raises(UnavailableError, match="the engine sends no heartbeat"):
        engine.check_responsive()
    again = Channel()
    run(engine, 1, again)
    engine.check_responsive()
    assert ask(engine, prompt(40), "back")[1] == 1
    assert engine.admission._max_open == full
    assert [replica.restart_count for replica in engine.replicas] == [0, 1]


@in_loop
async def test_server_ends_when_no_replica_is_left() -> None:
    engine, channels = engine_of(2)
    for replica in (1, 0):
        assert not engine.failed.done()
        channels[replica].is_open = False
        engine.on_engine_lost(replica, f"{replica} died", ready_in=1.0)
        engine.on_engine_failed(replica, f"{replica} died")
        assert engine.replicas[replica].state == "failed"
        if replica:
            engine.check_alive()
            with pytest.raises(EngineDeadError, match="1 died"):
                ask(engine, prompt(1), "pinned", rank=1)
    assert engine.failed.result() == "0 died"
    with pytest.raises(EngineDeadError):
        engine.check_alive()


@in_loop
async def test_counters_continue_after_an_engine_died() -> None:
    def stats(tokens: int) -> EngineStats:
        counts = (1, 0, 50, 20, 3, 0, 5, 0)
        pairs = [(tokens + at, (tokens, at)) for at in range(2)]
        ranks = tuple(RankStats(*counts, made, accepted_per_position=each) for made, each in pairs)
        counts, options = (2, 1, 100, 40, 3, 0, 10, 0), {"at": 1.0, "ranks": ranks}
        return EngineStats(*counts, 2 * tokens + 1, accepted_per_position=(tokens,), **options)

    engine, _ = engine_of(2, ranks=2)
    for replica in range(2):
        run(engine, replica, Channel(stats(100 * replica)), ranks=2)
    total = engine.stats
    assert (total.num_running, total.num_kv_blocks, total.generated_tokens) == (4, 200, 202)
    assert total.accepted_per_position == (100,)
    engine.on_engine_lost(1, "killed", ready_in=1.0)
    total = engine.stats
    assert (total.num_running, total.num_kv_blocks, total.generated_tokens) == (2, 100, 202)
    run(engine, 1, Channel(stats(7)), ranks=2)
    again = engine.replicas[1].stats
    assert [rank.generated_tokens for rank in again.by_rank] == [107, 109]
    assert [rank.num_running for rank in again.by_rank] == [1, 1]
    assert [rank.accepted_per_position for rank in again.by_rank] == [(107, 0), (107, 2)]
    assert engine.stats.generated_tokens == 217
    assert engine.stats.accepted_per_position == (107,)


@in_loop
async def test_abort_of_a_servers_requests_reaches_all_replicas() -> None:
    engine, channels = engine_of(2)
    for rank in (0, 1):
        ask(engine, prompt(rank), f"r{rank}", rank=rank)
    assert engine.abort(lambda owner: True) == 2
    assert all(isinstance(channel.sent[-1], wire.AbortRequests) for channel in channels)
    assert engine.abort(lambda owner: True) == 0


VISIBLE = "CUDA_VISIBLE_DEVICES"


def list_gpus(monkeypatch: pytest.MonkeyPatch, variable: str | None, **options: Any) -> list[str]:
    monkeypatch.setenv("PATH", "")
    if variable is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, variable)
    found = make_replica_options(EngineOptions(model="nano", **options))
    assert [one.show_progress for one, _ in found] == [True] + [False] * (len(found) - 1)
    return [variables.get(VISIBLE, "-") for _, variables in found]


def test_replicas_have_own_gpus_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert list_gpus(monkeypatch, None, num_replicas=3) == ["0", "1", "2"]
    assert list_gpus(monkeypatch, None, num_replicas=2, **sizes) == ["0,1,2,3", "4,5,6,7"]
    assert list_gpus(monkeypatch, "GPU-b, GPU-a,7", num_replicas=2) == ["GPU-b", "GPU-a"]
    assert list_gpus(monkeypatch, "3,1", num_replicas=1) == ["-"]
    assert list_gpus(monkeypatch, "3,1", num_replicas=3, device="cpu") == ["-"] * 3
    assert list_gpus(monkeypatch, "", num_replicas=3) == ["-"] * 3  # All run on the CPU.
    with pytest.raises(ConfigError) as refused:
        list_gpus(monkeypatch, "0,1,2,3,4,5,6", num_replicas=2, tensor_parallel_size=4)
    assert "2 needs 8 GPUs, 4 for each replica; 7 are available" in refused.value.message
    assert refused.value.hint == "use --num-replicas 1"
    known = INFO
    check_same_device([known, replace(known, device="cpu"), None])
    check_same_device([replace(known, device=f"cuda:{number}") for number in range(2)])
    with pytest.raises(ConfigError, match="one kind of device, not cuda, cpu"):
        check_same_device([replace(known, device="cuda:0"), replace(known, device="cpu")])


@pytest.mark.parametrize("count", [0, -1, 65])
def test_number_of_replicas_has_limits(count: int) -> None:
    with pytest.raises(ConfigError, match=f"--num-replicas is {count}; allowed: 1 to 64"):
        EngineOptions(model="nano", num_replicas=count)
    with pytest.raises(ConfigError, match="--num-replicas is 2; LLM runs one engine"):
        LLM("nano", num_replicas=2)


@in_loop
async def test_later_choices_compute_the_prompt_only_where_they_cannot_share_it() -> None:
    engine, _ = engine_of(1)
    assert engine.prefill_tokens(100, SamplingParams(), num_choices=3) == [100, 1, 1]
    scored = SamplingParams(prompt_logprobs=1)
    assert engine.prefill_tokens(100, scored, num_choices=3) == [100, 100, 100]
