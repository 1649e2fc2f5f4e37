import random
from typing import Any

from negamax.config.embedded import EMBEDDED
from negamax.config.generation import SamplingDefaults
from negamax.engine.client.output import ChoiceStream
from negamax.engine.wire import ModelInfo
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import SequenceUpdate, TokenLogprobs
from negamax.text.tokenizer import Tokenizer

TEXT = (
    "The keeper counts the ships that pass, writes their names down and wonders. Nobody asks "
    "him; ✓ nobody. END of it all."
)
TOKENIZER = Tokenizer.from_folder(EMBEDDED["nano"])
IDS = TOKENIZER.encode(TEXT)
EOS = 4116


def info() -> ModelInfo:
    return ModelInfo(
        model="nano",
        served_model_name="nano",
        architecture="MiniMaxM2ForCausalLM",
        max_model_len=4096,
        vocab_size=10_000,
        eos_token_ids=(EOS,),
        bos_token_id=None,
        sampling_defaults=SamplingDefaults(),
        max_logprobs=20,
        max_num_seqs=1,
        block_size=16,
        num_kv_blocks=1,
        device="cpu",
        dtype="float32",
    )


def run(sizes: list[int], *, stop: tuple[str, ...] = (), min_tokens: int = 0) -> tuple[Any, ...]:
    params = SamplingParams(stop=stop, min_tokens=min_tokens)
    stream = ChoiceStream(
        TOKENIZER, params, info=info(), request_id="r", index=0, num_prompt_tokens=1
    )
    ids, text, kept, num_logprobs, position = [*IDS, EOS], "", list[int](), 0, 0
    while not stream.finished:
        group = ids[position : position + (sizes.pop(0) if sizes else 1)]
        position += len(group)
        entries = [TokenLogprobs(token_id, -1.0, 1, [], []) for token_id in group]
        end = "stop" if position >= len(ids) else None
        output = stream.push(SequenceUpdate("r/0", group, entries, None, end, None, 0, None))
        text += output.text
        kept += output.token_ids
        num_logprobs += len(output.logprobs or ())
    return (
        text,
        output.num_output_tokens,
        kept,
        num_logprobs,
        output.finish_reason,
        output.stop_reason,
    )


def test_any_grouping_of_tokens_gives_the_same_answer() -> None:
    rng = random.Random(1)
    for stop in ((), ("END",), ("ships that pass", "Nobody"), ("absent",), ("✓",)):
        for min_tokens in (0, 12):
            one_by_one = run([1] * (len(IDS) + 1), stop=stop, min_tokens=min_tokens)
            for _ in range(30):
                assert (
                    run([rng.randint(1, 9) for _ in IDS], stop=stop, min_tokens=min_tokens)
                    == one_by_one
                )
            assert run([len(IDS) + 1], stop=stop, min_tokens=min_tokens) == one_by_one


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    text, count, kept, num_logprobs, reason, matched = run([len(IDS) + 1], stop=("END",))
    assert text == TEXT.partition("END")[0]
    assert (reason, matched) == ("stop", "END")
    assert count == len(kept) == num_logprobs < len(IDS)
