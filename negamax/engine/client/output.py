"""Convert tokens of the engine to text, find stop strings, and check requests."""

import random
from collections.abc import Sequence
from typing import Protocol

import msgspec

from negamax.base.errors import ContextLengthError, InvalidRequestError, UnavailableError
from negamax.engine.wire import ModelInfo, sequence_id
from negamax.scheduler.request import GenerateRequest, ImageInput, SamplingParams
from negamax.scheduler.step import SequenceUpdate, TokenLogprobs
from negamax.text.detokenizer import Detokenizer, TextPiece
from negamax.text.parser.events import ParserEvent
from negamax.text.tokenizer import Tokenizer


class TextReader(Protocol):
    """Parses the text of a choice, and finds stop strings in the content of the message."""

    @property
    def matched_stop(self) -> str | None:
        """Return the stop string that ended the text, or None."""

    def feed(self, pieces: Sequence[TextPiece], *, may_stop: bool) -> list[ParserEvent]:
        """Read further text. Without `may_stop`, ignore stop strings that end in `pieces`."""

    def finish(self, *, is_truncated: bool) -> list[ParserEvent]:
        """End the text. If `is_truncated` is set, a limit or an abort has ended the text."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    request_id: str
    index: int  # Index of the choice, 0 to n - 1.
    token_ids: list[int]
    pieces: list[TextPiece]  # Pieces of the text; a piece of a single token has the token's id.
    logprobs: list[TokenLogprobs] | None  # Logprobs of the tokens in token_ids.
    # `prompt_logprobs` of all prompt tokens after the first token; only in the first output.
    prompt_logprobs: list[TokenLogprobs] | None
    finish_reason: str | None  # "stop", "length", "abort" or "error"; None: not finished.
    stop_reason: int | str | None  # The stop token id or stop string that ended the choice.
    num_prompt_tokens: int
    num_output_tokens: int  # Output tokens of the choice, including this output.
    num_cached_tokens: int
    error: str | None
    drafts: tuple[int, int, int] | None = None  # Totals: drafts, draft tokens and accepted tokens.
    events: list[ParserEvent] | None = None  # Events of the choice's `TextReader`, if any.

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def join_outputs(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Join two outputs of the same choice. The result reuses the lists of `earlier`."""
    # A series of joins takes linear time, because each join extends the longer list.
    earlier.token_ids.extend(later.token_ids)
    earlier.pieces.extend(later.pieces)
    if earlier.logprobs is not None:
        earlier.logprobs.extend(later.logprobs or ())
    if earlier.events is not None:
        earlier.events.extend(later.events or ())
    return msgspec.structs.replace(
        later,
        token_ids=earlier.token_ids,
        pieces=earlier.pieces,
        logprobs=earlier.logprobs,
        prompt_logprobs=earlier.prompt_logprobs,
        events=earlier.events,
    )


class ChoiceStream:
    """Converts the updates of one sequence to outputs for one `OpenRequest`.

    If there is no `reader`, a stop string anywhere in the text ends the choice.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: GenerateRequest,
        index: int,
        *,
        info: ModelInfo,
        reader: TextReader | None = None,
    ) -> None:
        sampling = prompt.sampling
        self._request_id = prompt.request_id
        self._index = index
        self._num_prompt_tokens = len(prompt.prompt_token_ids)
        self._num_output_tokens = 0
        # The text does not include these tokens if they end the choice.
        self._hidden_ids = {*info.eos_token_ids, *sampling.stop_token_ids}
        if sampling.include_stop_str_in_output:
            self._hidden_ids.clear()
        self._has_stop_strings = bool(sampling.stop)
        # Without stop strings, the caller itself passes text of many tokens to the reader.
        self._reader = reader if sampling.stop else None
        self._min_tokens = sampling.min_tokens
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop if self._reader is None else (),
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        self.finished = False

    def push(self, update: SequenceUpdate) -> RequestOutput:
        """Return the output of an update. The caller aborts a sequence that a stop string ends."""
        token_ids, logprobs = update.token_ids, update.logprobs
        finish_reason = update.finish_reason
        stop_reason: int | str | None = update.stop_reason
        text_ids = token_ids
        if finish_reason == "stop" and token_ids and token_ids[-1] in self._hidden_ids:
            text_ids = token_ids[:-1]
        events: list[ParserEvent] | None = None if self._reader is None else []
        if self._has_stop_strings:
            pieces, num_used = self._push_until_stop(text_ids, events)
            if self._matched_stop is not None:  # Drop output tokens after the stop string.
                token_ids, logprobs = token_ids[:num_used], logprobs and logprobs[:num_used]
        else:
            pieces = self._detokenizer.push(text_ids)
        if finish_reason is not None and self._matched_stop is None:
            pieces += self._finish(events, is_truncated=finish_reason != "stop")
        if self._matched_stop is not None:
            finish_reason, stop_reason = "stop", self._matched_stop
        self._num_output_tokens += len(token_ids)
        self.finished = finish_reason is not None
        return RequestOutput(
            request_id=self._request_id,
            index=self._index,
            token_ids=token_ids,
            pieces=pieces,
            logprobs=logprobs,
            prompt_logprobs=update.prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_cached_tokens=update.num_cached_tokens,
            error=update.error,
            drafts=update.drafts,
            events=events,
        )

    @property
    def _matched_stop(self) -> str | None:
        return self._detokenizer.matched_stop if self._reader is None else self._reader.matched_stop

    def _push_until_stop(
        self, token_ids: Sequence[int], events: list[ParserEvent] | None
    ) -> tuple[list[TextPiece], int]:
        """Return the text up to a stop string, and its number of tokens. Add events to `events`."""
        pieces: list[TextPiece] = []
        for position, token_id in enumerate(token_ids, start=1):
            new = self._detokenizer.push([token_id])
            pieces += new
            if self._reader is not None and events is not None:
                may_stop = self._num_output_tokens + position >= self._min_tokens
                events += self._reader.feed(new, may_stop=may_stop)
            if self._matched_stop is not None:
                return pieces, position
        return pieces, len(token_ids)

    def _finish(self, events: list[ParserEvent] | None, *, is_truncated: bool) -> list[TextPiece]:
        pieces = self._detokenizer.finish()
        if self._reader is not None and events is not None:
            events += self._reader.feed(pieces, may_stop=True)
            if self._reader.matched_stop is None:
                events += self._reader.finish(is_truncated=is_truncated)
        return pieces


def split_choices(
    prompt: GenerateRequest,
    tokenizer: Tokenizer,
    *,
    info: ModelInfo,
    seeds: random.Random,
    readers: Sequence[TextReader] | None = None,
    server: int = 0,
) -> list[tuple[GenerateRequest, ChoiceStream]]:
    """Return (request, stream) of each choice. `prompt` has the id of the user's request.

    If `prompt` has no seed, the seed is drawn from `seeds`. Only choice 0 keeps the lease.
    """
    sampling, choices = prompt.sampling, []
    seed = seeds.getrandbits(63) if sampling.seed is None else sampling.seed
    for index in range(sampling.n):
        request = msgspec.structs.replace(
            prompt,
            request_id=sequence_id(prompt.request_id, index, server=server),
            sampling=sampling.copy_for_choice(index, seed=seed),
            lease_id="" if index else prompt.lease_id,
        )
        reader = None if readers is None else readers[index]
        choices.append((request, ChoiceStream(tokenizer, prompt, index, info=info, reader=reader)))
    return choices


def check_served(update: SequenceUpdate) -> None:
    """Raise `InvalidRequestError` if a request is refused, or `UnavailableError` if it is lost."""
    if update.is_lost:
        raise UnavailableError(update.error or "lost", code="no_grammar_process", retry_after=1.0)
    if update.lacks_prompt:
        raise UnavailableError(update.error or "lost", code="kv_load_failed", retry_after=1.0)
    if update.is_refusal:
        message = update.error or "refused"
        raise InvalidRequestError(message, param="grammar", code="invalid_grammar")


def admit(
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    info: ModelInfo,
    images: Sequence[ImageInput] = (),
) -> SamplingParams:
    """Check a prompt and its parameters against the model and fill in the model's defaults.

    Raises `InvalidRequestError` for an empty prompt, for ids outside the vocabulary, for parameters
    out of range, and for images that the model cannot read. Raises `ContextLengthError` if the
    prompt plus the requested output exceeds the context length.
    """
    if images and info.vision is None:
        raise InvalidRequestError(
            f"the prompt has {len(images)} images; this server's {info.served_model_name} reads "
            "text only",
            hint="send text only",
            param="messages",
            code="unsupported_content",
        )
    num_prompt_tokens = len(prompt_token_ids)
    if num_prompt_tokens == 0:
        raise InvalidRequestError(
            "the prompt is empty; at least one token is needed", param="prompt"
        )
    room = info.max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError.of_prompt(
            num_prompt_tokens, context_length=info.max_model_len, param="messages"
        )
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= info.vocab_size:
        token_id = low if low < 0 else high
        raise InvalidRequestError(
            f"the prompt contains token id {token_id}; allowed: 0 to {info.vocab_size - 1}",
            param="prompt",
            code="invalid_value",
        )
    sampling.check(max_logprobs=info.max_logprobs, vocab_size=info.vocab_size)
    if sampling.max_tokens is not None and sampling.max_tokens > room:
        sampling = msgspec.structs.replace(
            sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room)
        )
    if sampling.min_tokens > room:
        raise ContextLengthError(
            f"min_tokens is {sampling.min_tokens}; the prompt leaves {room} tokens of the context "
            f"length {info.max_model_len}",
            hint="shorten the prompt or lower min_tokens",
            param="min_tokens",
            code="context_length_exceeded",
        )
    return sampling.resolved(info.sampling_defaults, room=room)
