"""Write the fields that chat completions and plain completions have in common."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from negamax.api.common.answer import AnswerSource, AnswerWriter, ChoiceT, ResponseT
from negamax.api.common.context import FINGERPRINT, ApiContext
from negamax.api.common.transfer import describe_lease
from negamax.api.http.sse import DONE, encode_event
from negamax.api.schemas.answers import CompletionAnswer, TransferParams, Usage
from negamax.api.schemas.sampled_request import GenerationRequest
from negamax.engine.client.open_request import OpenRequest


class CompletionWriter(AnswerWriter[ChoiceT, ResponseT]):
    chunk_type: ClassVar[Callable[..., CompletionAnswer]]

    def __init__(
        self,
        context: ApiContext,
        params: GenerationRequest,
        source: AnswerSource,
        choices: Sequence[ChoiceT],
        *,
        answer_id: str,
        model: str,
    ) -> None:
        super().__init__(answer_id, source, choices)
        self._tokenizer = context.engine.tokenizer
        self._info = context.engine.info
        self._options = params.stream_options
        self._reports_tokens = params.return_token_ids or self._options.continuous_usage_stats
        self._head: dict[str, Any] = {
            "id": answer_id,
            "created": self.created,
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def end(self) -> bytes:
        if not self._options.reports_usage:
            return DONE
        return encode_event(self.chunk_type(**self._head, choices=[], usage=self.usage)) + DONE

    @property
    def _lease(self) -> TransferParams | UnsetType:
        """Parameters with which a decoding server reads the prompt's KV blocks from this server."""
        if not isinstance(self.source, OpenRequest):
            return UNSET
        info, request = self._info, self.source.requests[0]
        return describe_lease(request, info.transfer, block_size=info.block_size) or UNSET

    @property
    def _chunk_usage(self) -> Usage | UnsetType | None:
        """The field `usage` of each chunk before the last chunk."""
        if self._options.continuous_usage_stats:
            return self.usage
        return None if self._options.reports_usage else UNSET
