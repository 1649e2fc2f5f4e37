"""Store the unfinished requests of all data-parallel ranks, and validate new requests."""

from collections import Counter

from negamax.base.errors import ContextLengthError, InvalidRequestError, OverloadedError
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.sequence import Sequence


class RequestTable:
    """Unfinished sequences by request id. Tenants with requests of equal priority take turns."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.num_constrained = 0  # number of sequences with `is_constrained` set
        self.num_rows: Counter[str] = Counter()  # number of running sequences by tenant
        self.admitted: list[str] = []  # ids that `GroupScheduler.take_admitted` returns
        self._limits = limits
        self._count = 0
        self._turn = 0  # largest `Sequence.turn` of the admitted requests
        self._last_turns: dict[str, int] = {}  # `Sequence.turn` of each tenant's latest request

    def add(self, request: GenerateRequest, *, num_waiting: int) -> Sequence:
        """Create the sequence of a resolved request. Raises `ContextLengthError` if the prompt
        leaves no room for output, `OverloadedError` if the queue is full, and `InvalidRequestError`
        if the prompt is empty, the id is in use or the request can never fit.
        """
        limits, max_tokens = self._limits, request.sampling.max_tokens
        assert max_tokens is not None, "sampling must be resolved before `add` is called"
        prompt_len = len(request.prompt_token_ids)
        if request.request_id in self.sequences:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use by an unfinished request; choose "
                f"another id",
                param="request_id",
                code="duplicate_request_id",
            )
        if prompt_len == 0:
            raise InvalidRequestError(
                "the prompt has 0 tokens; at least 1 is needed", param="prompt", code="empty_prompt"
            )
        if prompt_len >= limits.max_model_len:
            raise ContextLengthError.of_prompt(
                prompt_len, context_length=limits.max_model_len, param="prompt"
            )
        limit = min(prompt_len + max_tokens, limits.max_model_len)
        self._check_pool(prompt_len, limit=limit)
        if request.images:
            self._check_images(request)
        if num_waiting >= limits.max_queued_requests:
            raise OverloadedError(
                f"{num_waiting} requests are waiting, and the limit is {limits.max_queued_requests}"
                f"; try again later",
                code="queue_full",
            )
        turn = max(self._turn, self._last_turns.get(request.tenant, 0)) + 1
        self._last_turns[request.tenant] = turn
        self._count += 1
        sequence = Sequence(request, limits, limit=limit, turn=turn, arrival=self._count)
        self.sequences[request.request_id] = sequence
        self.num_constrained += sequence.is_constrained
        return sequence

    def admit(self, sequence: Sequence) -> bool:
        """Record that a sequence gets a slot. Return whether the sequence had no slot before."""
        self._turn = max(self._turn, sequence.turn)
        self.num_rows[sequence.tenant] += 1
        is_first, sequence.was_admitted = not sequence.was_admitted, True
        self.admitted += [sequence.request_id] * is_first
        if is_first:
            remote = sequence.request.num_remote_cached_tokens
            sequence.num_cached_tokens = sequence.num_computed if remote is None else remote
        return is_first

    def leave(self, sequence: Sequence) -> None:
        """Record that a running sequence ends or is preempted."""
        self.num_rows -= Counter((sequence.tenant,))  # `-=` removes tenants without rows

    def remove(self, sequence: Sequence) -> None:
        sequence.finished = True
        self.clear_grammar(sequence)
        del self.sequences[sequence.request_id]

    def clear_grammar(self, sequence: Sequence) -> None:
        self.num_constrained -= sequence.is_constrained
        sequence.is_constrained = False

    def _check_images(self, request: GenerateRequest) -> None:
        """Refuse images if there is no vision tower, or if an image exceeds the encoder cache."""
        room = self._limits.encoder_tokens
        if not room:
            raise InvalidRequestError(
                f"the prompt has {len(request.images)} images; this engine reads text only",
                hint="send text, or serve a checkpoint with a vision tower",
                param="messages",
                code="images_not_supported",
            )
        end = 0
        for number, image in enumerate(request.images):
            if image.num_tokens > room:
                raise InvalidRequestError(
                    f"image {number} has {image.num_tokens} tokens; the encoder cache holds {room}",
                    hint="send a smaller image, or start the server with more "
                    "--encoder-cache-tokens",
                    param="messages",
                    code="image_too_large",
                )
            if image.offset < end or image.end >= len(request.prompt_token_ids):
                raise InvalidRequestError(
                    f"image {number} covers tokens {image.offset} to {image.end} of a prompt of "
                    f"{len(request.prompt_token_ids)} tokens; images must not overlap, and a token "
                    f"must follow the last image",
                    param="messages",
                    code="invalid_value",
                )
            end = image.end

    def _check_pool(self, prompt_len: int, *, limit: int) -> None:
        """Refuse a request if all its tokens but the last need more blocks than the pool has."""
        limits = self._limits
        needed = -(-(limit - 1) // limits.block_size)
        if needed <= limits.num_blocks:
            return
        room = limits.num_blocks * limits.block_size + 1 - prompt_len
        remedy = f"lower max_tokens to {room} or less" if room > 0 else "shorten the prompt"
        raise InvalidRequestError(
            f"the request may grow to {limit} tokens, of which {prompt_len} are prompt tokens, and "
            f"may need {needed} KV blocks of {limits.block_size} tokens; the pool has "
            f"{limits.num_blocks} KV blocks; {remedy}",
            hint="or start the server with a larger --num-kv-blocks or --kv-cache-memory",
            param="max_tokens" if room > 0 else "prompt",
            code="kv_cache_exceeded",
        )
