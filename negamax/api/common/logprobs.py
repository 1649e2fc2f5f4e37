"""Convert token log-probabilities into the JSON formats of OpenAI's APIs and of vLLM."""

import codecs
import functools
from collections.abc import Sequence

from negamax.api.schemas.answers import (
    ChatLogprob,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TopLogprob,
)
from negamax.scheduler.step import TokenLogprobs
from negamax.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # Replaces -inf as in vLLM, because JSON has no -inf.


def _get_text(tokenizer: Tokenizer, token_id: int, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)


@functools.lru_cache(maxsize=4096)
def _describe(tokenizer: Tokenizer, token_id: int, *, as_ids: bool) -> tuple[str, list[int]]:
    """Return the text and the bytes of a token. Callers must not change the cached result."""
    return _get_text(tokenizer, token_id, as_ids=as_ids), list(tokenizer.token_bytes(token_id))


def convert_chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], *, as_ids: bool = False
) -> list[ChatLogprob]:
    """Build one logprob entry per token. With `as_ids` the text of token 123 is "token_id:123"."""
    describe = functools.partial(_describe, tokenizer, as_ids=as_ids)
    converted = []
    for entry in entries:
        tops = []
        for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            text, values = describe(token_id)
            tops.append(TopLogprob(text, max(logprob, LEAST_LOGPROB), values))
        text, values = describe(entry.token_id)
        converted.append(ChatLogprob(text, max(entry.logprob, LEAST_LOGPROB), values, tops))
    return converted


def convert_prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]
) -> PromptLogprobs:
    """Build vLLM's list of logprobs: null for the first prompt token, then an object per token."""
    answer: PromptLogprobs = [None]
    for entry in entries:
        ranked = dict(zip(entry.top_ids, enumerate(entry.top_logprobs, start=1), strict=True))
        ranked.setdefault(entry.token_id, (entry.rank, entry.logprob))
        answer.append(
            {
                str(token_id): PromptLogprob(
                    max(logprob, LEAST_LOGPROB), rank, tokenizer.token_text(token_id)
                )
                for token_id, (rank, logprob) in ranked.items()
            }
        )
    return answer


class TextLogprobWriter:
    """Collects token logprobs and text offsets. Only the request's handler changes this object."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0
        self._taken = TextLogprobs([], [], [], [])

    def push(self, entry: TokenLogprobs) -> None:
        """Add a token. Of tokens with equal texts, keep the sampled one or else the likeliest."""
        chosen, texts = max(entry.logprob, LEAST_LOGPROB), dict[str, float]()
        for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            texts.setdefault(self._text(token_id), max(logprob, LEAST_LOGPROB))
        texts[self._text(entry.token_id)] = chosen
        self._add(entry.token_id, chosen, texts)

    def push_first(self, token_id: int) -> None:
        self._add(token_id, None, None)

    def take(self) -> TextLogprobs:
        taken, self._taken = self._taken, TextLogprobs([], [], [], [])
        return taken

    def _text(self, token_id: int) -> str:
        return _get_text(self._tokenizer, token_id, as_ids=self._as_ids)

    def _add(self, token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        self._taken.tokens.append(self._text(token_id))
        self._taken.token_logprobs.append(logprob)
        self._taken.top_logprobs.append(top)
        self._taken.text_offset.append(self._offset)
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
