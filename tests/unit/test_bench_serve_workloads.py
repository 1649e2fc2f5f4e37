import json
import statistics
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.bench.agent_sessions import AgentSessions
from negamax.bench.serve import arrivals, request_fields
from negamax.bench.serve_client import RequestRecord
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


def turns(
    session: Session, message: dict[str, Any] | None = None, finish_reason: str = "stop"
) -> list[SessionTurn]:
    running = session.start()
    found = [next(running)]
    while True:
        try:
            found.append(
                running.send(TurnResponse(RequestRecord(0, finish_reason=finish_reason), message))
            )
        except StopIteration:
            return found


def ids(turn: SessionTurn) -> list[int]:
    found: list[int] = turn.body["prompt"]
    return found


def test_random_ids_have_exactly_the_lengths_asked_for() -> None:
    options = BenchOptions(random_input_len=50, random_output_len=7, random_prefix_len=5)
    made = list(islice(random_turns(Prompts(options, None)), 20))
    assert {len(ids(turn)) for turn in made} == {55}
    assert {turn.prompt_tokens for turn in made} == {55}
    assert {turn.body["max_tokens"] for turn in made} == {7}
    assert len({tuple(ids(turn)[:5]) for turn in made}) == 1
    assert len({tuple(ids(turn)[5:]) for turn in made}) == 20


def test_random_lengths_stay_within_the_range_ratio_and_the_announced_longest() -> None:
    options = BenchOptions(random_input_len=100, random_output_len=10, random_range_ratio=0.5)
    made = list(islice(random_turns(Prompts(options, None)), 500))
    lengths = [len(ids(turn)) for turn in made]
    assert 50 <= min(lengths) < 60 and 140 < max(lengths) <= 150
    assert {turn.body["max_tokens"] for turn in made} == set(range(5, 16))
    assert max(len(ids(turn)) + turn.body["max_tokens"] for turn in made) <= longest_prompt(options)
    assert statistics.mean(lengths) == pytest.approx(100, abs=6)


def test_seed_decides_the_prompts() -> None:
    first, again, other = (
        [ids(turn) for turn in islice(random_turns(Prompts(BenchOptions(seed=seed), None)), 3)]
        for seed in (1, 1, 2)
    )
    assert first == again and first != other


def test_ids_come_from_the_vocabulary_given() -> None:
    (turn,) = islice(random_turns(Prompts(BenchOptions(), None, [7, 9])), 1)
    assert set(ids(turn)) == {7, 9}


def test_text_is_sized_by_the_servers_own_tokens_per_character() -> None:
    options = BenchOptions(random_input_len=100, endpoint=CHAT)
    (turn,) = islice(random_turns(Prompts(options, SCALE)), 1)
    (message,) = turn.body["messages"]
    assert len(message["content"]) == (100 - 20) * 4
    assert turn.prompt_tokens is None  # as the server reports


def test_each_prefix_is_used_equally_often_and_suffixes_differ() -> None:
    options = BenchOptions(
        num_prompts=12,
        num_warmups=2,
        prefix_repetition_num_prefixes=4,
        prefix_repetition_prefix_len=6,
        prefix_repetition_suffix_len=3,
    )
    workload = endless_workload(prefix_repetition_turns(Prompts(options, None)), options)
    made = [ids(turn) for session in workload.sessions for turn in turns(session)]
    assert sorted(Counter(tuple(prompt[:6]) for prompt in made).values()) == [3, 3, 3, 3]
    assert len({tuple(prompt) for prompt in made}) == 12
    warm = [ids(turn) for session in workload.warmups for turn in turns(session)]
    assert len(warm) == 2 and not {tuple(prompt) for prompt in warm} & {
        tuple(prompt) for prompt in made
    }


def test_sharegpt_file_gives_questions_and_the_lengths_of_recorded_answers(tmp_path: Path) -> None:
    def conversation(question: str, answer: str) -> dict[str, Any]:
        said = [
            ("system", "Be kind."),
            ("human", question),
            ("gpt", answer),
            ("human", "and then?"),
        ]
        return {"conversations": [{"from": who, "value": text} for who, text in said]}

    file = tmp_path / "chats.json"
    chats = [
        conversation("w " * 10, "w " * 30),
        conversation("w", "too short"),
        {"conversations": []},
        conversation("w " * 500, "w " * 30),
    ]
    openai_style = {
        "messages": [
            {"role": "user", "content": "x " * 8},
            {"role": "assistant", "content": "x " * 9},
        ]
    }
    file.write_text(json.dumps([*chats, openai_style]))
    pairs = read_sharegpt(str(file))
    assert len(pairs) == 4
    options = BenchOptions(
        dataset_name="sharegpt", dataset_path=str(file), num_prompts=5, endpoint=CHAT
    )
    workload = sharegpt_workload(
        pairs, options, count=lambda text: len(text.split()), context_length=100
    )
    bodies = [turn.body for session in workload.sessions for turn in turns(session)]
    assert len(bodies) == 5  # two that fit, repeated
    assert {(body["messages"][0]["content"], body["max_tokens"]) for body in bodies} == {
        ("w " * 10, 30),
        ("x " * 8, 9),
    }
    assert any("2 conversations left out" in note for note in workload.notes)
    assert any("repeated" in note for note in workload.notes)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is no JSON"), ("{}", "holds no list"), ("[1, {}]", "none of the 2 conversations")],
)
def test_broken_sharegpt_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "chats.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_sharegpt(str(file))


def test_recorded_requests_keep_sessions_delays_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    said = [{"role": "user", "content": "hi"}]
    lines = [
        {"session": "a", "body": {"messages": said, "max_completion_tokens": 5}},
        {"messages": said},
        {
            "session": "a",
            "delay": 0.25,
            "body": {"messages": said, "max_tokens": 6, "temperature": 0},
        },
    ]
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    options = BenchOptions(
        dataset_name="custom",
        dataset_path=str(file),
        endpoint=CHAT,
        num_prompts=3,
        custom_output_len=9,
    )
    sessions = read_requests(str(file), options)
    first, second = (turns(session) for session in sessions)
    assert [turn.body.get("max_tokens") for turn in first] == [None, 6]
    assert [turn.pause for turn in first] == [0.0, 0.25]
    assert second[0].body["max_tokens"] == 9
    assert file_workload(sessions, options).num_requests == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 .* is no JSON"),
        ("[]", "an object is needed"),
        ('{"prompt": "x"}', "no 'messages'"),
        ('{"body": {"messages": []}, "delay": -1}', "delay -1"),
        ("", "has no requests"),
    ],
)
def test_broken_recordings_are_refused(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_requests(str(file), BenchOptions(endpoint=CHAT))


def test_sessions_are_cut_to_the_number_of_requests() -> None:
    sessions = take_turns(iter(AgentSessions(AGENT, scale=SCALE, context_length=None)), 40)
    assert [session.num_turns for session in sessions] == [15, 15, 10]
    assert [len(turns(session)) for session in sessions] == [15, 15, 10]
    assert len(turns(shortened(sessions[0], 1))) == 1


def test_agent_history_grows_at_its_end_only_and_every_session_begins_alike() -> None:
    sessions = list(islice(AgentSessions(AGENT, scale=SCALE, context_length=None), 2))
    bodies = [turn.body for turn in turns(sessions[0])]
    for earlier, later in pairwise(bodies):
        assert later["messages"][: len(earlier["messages"])] == earlier["messages"]
        assert len(later["messages"]) > len(earlier["messages"])
        assert later["tools"] == earlier["tools"]
    other = turns(sessions[1])[0].body
    assert (
        other["messages"][0] == bodies[0]["messages"][0]
        and other["messages"][1] != bodies[0]["messages"][1]
    )
    assert len(other["tools"]) == 12


def test_agent_history_is_one_that_servers_accept() -> None:
    history = turns(AgentSessions(AGENT, scale=SCALE, context_length=None).session())[-1].body[
        "messages"
    ]
    assert normalize_messages(history)
    kinds = Counter(message["role"] for message in history)
    assert kinds["tool"] >= kinds["assistant"] - kinds["user"] > 0 and kinds["user"] >= 2
    assert all(
        message["reasoning_content"] for message in history if message["role"] == "assistant"
    )


def test_agent_sessions_end_before_the_window_does() -> None:
    session = AgentSessions(AGENT, scale=SCALE, context_length=4000).session()
    bodies = [turn.body for turn in turns(session)]
    assert 1 < len(bodies) < 15
    assert len(json.dumps(bodies[-1])) * SCALE.tokens_per_char + AGENT.agent_output_len < 4000


def test_agent_sizes_are_those_asked_for() -> None:
    history = turns(AgentSessions(AGENT, scale=SCALE, context_length=None).session())[-1].body[
        "messages"
    ]
    assert len(history[0]["content"]) == pytest.approx(500 * 4, rel=0.01)
    tool_chars = sum(len(message["content"]) for message in history if message["role"] == "tool")
    steps = sum("tool_calls" in message for message in history)
    assert tool_chars / steps == pytest.approx(200 * 4, rel=0.35)


def test_live_sessions_send_the_servers_own_answers_back() -> None:
    options = BenchOptions(dataset_name="agent", agent_turns=6, agent_history="live")
    session = AgentSessions(options, scale=SCALE, context_length=None).session()
    assert session.wants_responses
    call = {
        "id": "call_x",
        "type": "function",
        "function": {"name": "read_file", "arguments": "{}"},
    }
    answer = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    history = turns(session, answer, "tool_calls")[-1].body["messages"]
    assert [message["role"] for message in history[2:4]] == ["assistant", "tool"]
    assert history[2] == answer and history[3]["tool_call_id"] == "call_x" and history[3]["content"]
    assert normalize_messages(history)
    cut_off = turns(session, answer, "length")[-1].body["messages"]
    assert "tool_calls" not in cut_off[2] and cut_off[3]["role"] == "user"
    assert normalize_messages(cut_off)


def test_live_session_ends_with_a_failed_answer() -> None:
    options = BenchOptions(dataset_name="agent", agent_turns=6, agent_history="live")
    running = AgentSessions(options, scale=SCALE, context_length=None).session().start()
    next(running)
    with pytest.raises(StopIteration):
        running.send(
            TurnResponse(RequestRecord(0, error="HTTP 500"), {"role": "assistant", "content": ""})
        )


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(
    burstiness: float, variation: float
) -> None:
    times = list(islice(arrivals(BenchOptions(request_rate=5.0, burstiness=burstiness)), 20_001))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.05)


def test_without_a_rate_everything_starts_at_once() -> None:
    assert list(islice(arrivals(BenchOptions()), 3)) == [0.0, 0.0, 0.0]


def test_requests_carry_only_the_sampling_that_was_asked_for() -> None:
    options = BenchOptions(temperature=0.0, ignore_eos=True, extra_body={"top_k": 5, "n": 1})
    fields = request_fields(options, "nano", running_usage=False)
    assert fields == {
        "model": "nano",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
        "top_k": 5,
        "n": 1,
    }
    counted = request_fields(options, "nano", running_usage=True)["stream_options"]
    assert counted == {"include_usage": True, "continuous_usage_stats": True}


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
def test_range_ratio_means_what_it_means_to_users_of_the_backend(
    options: BenchOptions, lengths: tuple[int, int]
) -> None:
    assert options.length_range(1000) == lengths
