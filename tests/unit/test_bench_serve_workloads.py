import json
import statistics
from collections import Counter
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.bench.agent_sessions import AgentSessions
from negamax.bench.serve import arrivals, request_fields
from negamax.bench.serve_client import ResponseRecord
from negamax.bench.serve_options import CHAT, BenchOptions
from negamax.bench.serve_workloads import (
    Prompts,
    Session,
    SessionTurn,
    TextScale,
    TurnResponse,
    endless_workload,
    file_workload,
    longest_prompt,
    prefix_repetition_turns,
    random_turns,
    read_requests,
    read_sharegpt,
    sharegpt_workload,
    shortened,
    take_turns,
)
from negamax.text.messages import normalize_messages

SCALE = TextScale(tokens_per_char=0.25, overhead=20)
AGENT = BenchOptions(
    dataset_name="agent", agent_turns=15, agent_result_len=200, agent_system_len=500, seed=3
)
LIVE = BenchOptions(dataset_name="agent", agent_turns=6, agent_history="live")


def agent_sessions(
    options: BenchOptions = AGENT, *, context_length: int | None = None
) -> AgentSessions:
    return AgentSessions(options, scale=SCALE, context_length=context_length)


def turns(
    session: Session, message: dict[str, Any] | None = None, finish_reason: str = "stop"
) -> list[SessionTurn]:
    running = session.start()
    found = [next(running)]
    while True:
        try:
            response = TurnResponse(ResponseRecord(0, finish_reason=finish_reason), message)
            found.append(running.send(response))
        except StopIteration:
            return found


def ids(turn: SessionTurn) -> list[int]:
    found: list[int] = turn.body["prompt"]
    return found


def made(options: BenchOptions, count: int, *prompts: Any) -> list[SessionTurn]:
    """Return random turns. Prompts are token ids if `prompts` is empty."""
    return list(islice(random_turns(Prompts(options, *(prompts or (None,)))), count))


def test_random_ids_have_the_lengths_seed_and_vocabulary_asked_for() -> None:
    options = BenchOptions(random_input_len=50, random_output_len=7, random_prefix_len=5)
    found = made(options, 20)
    assert {(len(ids(turn)), turn.prompt_tokens) for turn in found} == {(55, 55)}
    assert {turn.body["max_tokens"] for turn in found} == {7}
    assert len({tuple(ids(turn)[:5]) for turn in found}) == 1
    assert len({tuple(ids(turn)[5:]) for turn in found}) == 20
    first, again, other = ([*map(ids, made(BenchOptions(seed=seed), 3))] for seed in (1, 1, 2))
    assert first == again and first != other
    (turn,) = made(BenchOptions(), 1, None, [7, 9])
    assert set(ids(turn)) == {7, 9}
    options = BenchOptions(random_input_len=100, random_output_len=10, random_range_ratio=0.5)
    sizes = [(len(ids(turn)), turn.body["max_tokens"]) for turn in made(options, 500)]
    lengths = [length for length, _ in sizes]
    assert 50 <= min(lengths) < 60 and 140 < max(lengths) <= 150
    assert {max_tokens for _, max_tokens in sizes} == set(range(5, 16))
    assert max(map(sum, sizes)) <= longest_prompt(options)
    assert statistics.mean(lengths) == pytest.approx(100, abs=6)


def test_text_is_sized_by_the_servers_own_tokens_per_character() -> None:
    (turn,) = made(BenchOptions(random_input_len=100, endpoint=CHAT), 1, SCALE)
    (message,) = turn.body["messages"]
    assert len(message["content"]) == (100 - 20) * 4
    assert turn.prompt_tokens is None  # The server reports the number of prompt tokens.


def test_each_prefix_is_used_equally_often_and_suffixes_differ() -> None:
    sizes = {"num_prefixes": 4, "prefix_len": 6, "suffix_len": 3}
    named = {f"prefix_repetition_{name}": size for name, size in sizes.items()}
    options = BenchOptions(num_prompts=12, num_warmups=2, **named)
    workload = endless_workload(prefix_repetition_turns(Prompts(options, None)), options)
    both = (workload.sessions, workload.warmups)
    timed, warm = ([tuple(ids(turn)) for each in part for turn in turns(each)] for part in both)
    assert sorted(Counter(prompt[:6] for prompt in timed).values()) == [3, 3, 3, 3]
    assert len(set(timed)) == 12
    assert len(warm) == 2 and not set(warm) & set(timed)


def test_sharegpt_file_gives_questions_and_the_lengths_of_recorded_answers(tmp_path: Path) -> None:
    def conversation(question: str, answer: str) -> dict[str, Any]:
        said = {"system": "Be kind.", "human": question, "gpt": answer, "user": "and then?"}
        return {"conversations": [{"from": who, "value": text} for who, text in said.items()]}

    file = tmp_path / "chats.json"
    asked, answered = "w " * 10, "w " * 30
    chats = [conversation(asked, answered), conversation("w", "too short")]
    chats += [{"conversations": []}, conversation("w " * 500, answered)]
    said = {"user": "x " * 8, "assistant": "x " * 9}
    openai_style = {"messages": [{"role": who, "content": text} for who, text in said.items()]}
    file.write_text(json.dumps([*chats, openai_style]))
    pairs = read_sharegpt(str(file))
    assert len(pairs) == 4
    names = {"dataset_name": "sharegpt", "dataset_path": str(file), "endpoint": CHAT}
    options, words = BenchOptions(**names, num_prompts=5), lambda text: len(text.split())
    workload = sharegpt_workload(pairs, options, count=words, context_length=100)
    bodies = [turn.body for session in workload.sessions for turn in turns(session)]
    assert len(bodies) == 5  # Two prompts fit and are repeated.
    found = {(body["messages"][0]["content"], body["max_tokens"]) for body in bodies}
    assert found == {(asked, 30), ("x " * 8, 9)}
    assert any("2 conversations were skipped" in note for note in workload.notes)
    assert any("repeated" in note for note in workload.notes)


def test_recorded_requests_keep_sessions_delays_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    said = [{"role": "user", "content": "hi"}]
    second = {"messages": said, "max_tokens": 6, "temperature": 0}
    lines = [
        {"session": "a", "body": {"messages": said, "max_completion_tokens": 5}},
        {"messages": said},
        {"session": "a", "delay": 0.25, "body": second},
    ]
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    names = {"dataset_name": "custom", "dataset_path": str(file), "endpoint": CHAT}
    options = BenchOptions(**names, num_prompts=3, custom_output_len=9)
    sessions = read_requests(str(file), options)
    recorded, alone = (turns(session) for session in sessions)
    found = [(turn.body.get("max_tokens"), turn.pause) for turn in recorded]
    assert found == [(None, 0), (6, 0.25)]
    assert alone[0].body["max_tokens"] == 9
    assert file_workload(sessions, options).num_requests == 3


def read_chats(path: str) -> list[Session]:
    return read_requests(path, BenchOptions(endpoint=CHAT))


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_sharegpt, "{", "is not JSON"),
        (read_sharegpt, "{}", "does not contain a list"),
        (read_sharegpt, "[1, {}]", "none of the 2 conversations"),
        (read_chats, "{", "line 1 .* is not JSON"),
        (read_chats, "[]", "an object is needed"),
        (read_chats, '{"prompt": "x"}', "no 'messages'"),
        (read_chats, '{"body": {"messages": []}, "delay": -1}', "delay -1"),
        (read_chats, "", "has no requests"),
    ],
)
def test_bad_files(tmp_path: Path, read: Callable[[str], object], text: str, message: str) -> None:
    file = tmp_path / "requests"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(str(file))


def test_sessions_end_with_the_requests_or_the_context_length() -> None:
    sessions = take_turns(iter(agent_sessions()), 40)
    assert [session.num_turns for session in sessions] == [15, 15, 10]
    assert [len(turns(session)) for session in sessions] == [15, 15, 10]
    assert len(turns(shortened(sessions[0], 1))) == 1
    session = agent_sessions(context_length=4000).session()
    bodies = [turn.body for turn in turns(session)]
    assert 1 < len(bodies) < 15
    assert len(json.dumps(bodies[-1])) * SCALE.tokens_per_char + AGENT.agent_output_len < 4000


def test_agent_history_grows_at_its_end_only_and_every_session_begins_alike() -> None:
    sessions = list(islice(agent_sessions(), 2))
    bodies = [turn.body for turn in turns(sessions[0])]
    for earlier, later in pairwise(bodies):
        assert later["messages"][: len(earlier["messages"])] == earlier["messages"]
        assert len(later["messages"]) > len(earlier["messages"])
        assert later["tools"] == earlier["tools"]
    other = turns(sessions[1])[0].body
    (same, asked), (system, first) = other["messages"][:2], bodies[0]["messages"][:2]
    assert same == system and asked != first and len(other["tools"]) == 12


def test_agent_history_has_the_sizes_asked_for_and_servers_accept_it() -> None:
    history = turns(agent_sessions().session())[-1].body["messages"]
    assert normalize_messages(history)
    kinds = Counter(message["role"] for message in history)
    assert kinds["tool"] >= kinds["assistant"] - kinds["user"] > 0 and kinds["user"] >= 2
    assert all(one["reasoning_content"] for one in history if one["role"] == "assistant")
    assert len(history[0]["content"]) == pytest.approx(500 * 4, rel=0.01)
    tool_chars = sum(len(message["content"]) for message in history if message["role"] == "tool")
    steps = sum("tool_calls" in message for message in history)
    assert tool_chars / steps == pytest.approx(200 * 4, rel=0.35)


def test_live_sessions_send_the_servers_own_answers_back() -> None:
    session = agent_sessions(LIVE).session()
    assert session.wants_responses
    function = {"name": "read_file", "arguments": "{}"}
    call = {"id": "call_x", "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    history = turns(session, answer, "tool_calls")[-1].body["messages"]
    assert [message["role"] for message in history[2:4]] == ["assistant", "tool"]
    assert history[2] == answer and history[3]["tool_call_id"] == "call_x" and history[3]["content"]
    assert normalize_messages(history)
    truncated = turns(session, answer, "length")[-1].body["messages"]
    assert "tool_calls" not in truncated[2] and truncated[3]["role"] == "user"
    assert normalize_messages(truncated)
    running = agent_sessions(LIVE).session().start()
    next(running)
    failed = ResponseRecord(0, error="HTTP 500")
    with pytest.raises(StopIteration):
        running.send(TurnResponse(failed, {"role": "assistant", "content": ""}))


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_burstiness(burstiness: float, variation: float) -> None:
    times = list(islice(arrivals(BenchOptions(request_rate=5.0, burstiness=burstiness)), 20_001))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.05)
    # Without a rate, all requests start at once.
    assert list(islice(arrivals(BenchOptions()), 3)) == [0.0, 0.0, 0.0]


def test_requests_carry_only_the_sampling_that_was_asked_for() -> None:
    options = BenchOptions(temperature=0.0, ignore_eos=True, extra_body={"top_k": 5, "n": 1})
    fields = request_fields(options, "nano", running_usage=False)
    streaming = {"model": "nano", "stream": True, "stream_options": {"include_usage": True}}
    assert fields == streaming | {"temperature": 0.0, "ignore_eos": True, "top_k": 5, "n": 1}
    counted = request_fields(options, "nano", running_usage=True)["stream_options"]
    assert counted == {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ({"backend": "sglang"}, True),
        ({"backend": "sglang-oai-chat"}, True),
        ({"backend": "sglang", "disable_ignore_eos": True}, False),
        ({"backend": "vllm"}, False),
    ],
)
def test_end_tokens_are_ignored_as_sglang_does(options: dict[str, Any], ignored: bool) -> None:
    fields = request_fields(BenchOptions(**options), "nano", running_usage=False)
    assert fields.get("ignore_eos", False) is ignored


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        (BenchOptions(random_range_ratio=0.3), (700, 1300)),
        (BenchOptions(random_range_ratio=0.0), (1000, 1000)),
        (BenchOptions(random_range_ratio=0.3, backend="sglang"), (300, 1000)),
        (BenchOptions(random_range_ratio=1.0, backend="sglang-oai-chat"), (1000, 1000)),
        (BenchOptions(backend="sglang"), (1, 1000)),
        (BenchOptions(random_range_ratio=0.5, random_range_rule="sglang"), (500, 1000)),
    ],
)
def test_range_ratio_by_backend(options: BenchOptions, lengths: tuple[int, int]) -> None:
    assert options.length_range(1000) == lengths
