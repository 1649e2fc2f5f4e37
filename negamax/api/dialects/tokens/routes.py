"""Serve /tokenize, /detokenize and /tokenizer_info."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from negamax.api.access import get_salt
from negamax.api.common.context import ApiContext
from negamax.api.common.conversation import Conversation, compute_max_tokens
from negamax.api.dialects.tokens import schema
from negamax.api.errors import build_json_response
from negamax.api.http.request_body import compute_max_chars, read_request
from negamax.api.http.request_threads import run_off_loop
from negamax.api.openapi import describe_body
from negamax.api.schemas.request_model import refuse
from negamax.config.generation import token_text
from negamax.text.tokenizer import Tokenizer


def make_tokens_router(context: ApiContext) -> APIRouter:
    """Build the routes at the paths of vLLM and SGLang."""
    router = APIRouter()

    async def tokenize(http: Request) -> Response:
        """Tokenize texts or a conversation."""
        params, num_bytes = await read_request(http, schema.TokenizeRequest, context.body_limits)
        context.model_name(params.model)
        if (params.prompt is None) == (params.messages is None):
            refuse("prompt", "send either prompt or messages")
        if params.prompt is None:
            prompt = await context.prompts.chat(
                _build_conversation(params),
                num_bytes=num_bytes,
                cache_salt=get_salt(http, ""),
                needs_pixels=False,
            )
            texts = [prompt.token_ids]
        else:
            given = [params.prompt] if isinstance(params.prompt, str) else params.prompt
            texts = await context.prompts.plain(given, cache_salt=get_salt(http, ""))
        is_list = isinstance(params.prompt, list)
        counts = [len(ids) for ids in texts]
        token_text = context.engine.tokenizer.token_text

        def answer() -> Response:
            shown: list[Any] | UnsetType = UNSET
            if params.return_token_strs:
                strings = [[token_text(i) for i in ids] for ids in texts]
                shown = strings if is_list else strings[0]
            return build_json_response(
                schema.TokenizeAnswer(
                    count=counts if is_list else counts[0],
                    max_model_len=context.engine.info.max_model_len,
                    tokens=texts if is_list else texts[0],
                    token_strs=shown,
                )
            )

        return await run_off_loop(answer, num_bytes=sum(counts))

    async def detokenize(http: Request) -> Response:
        """Return the text of token ids."""
        params, num_bytes = await read_request(http, schema.DetokenizeRequest, context.body_limits)
        context.model_name(params.model)
        is_nested = bool(params.tokens) and isinstance(params.tokens[0], list)
        sequences: list[Any] = params.tokens if is_nested else [params.tokens]
        tokenizer = context.engine.tokenizer

        def answer() -> Response:
            _check_vocabulary(sequences, vocab_size=context.engine.info.vocab_size)
            _check_sizes(sequences, tokenizer, max_model_len=context.engine.info.max_model_len)
            texts = [
                tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
                for ids in sequences
            ]
            text = texts if is_nested else texts[0]
            return build_json_response(schema.DetokenizeAnswer(prompt=text, text=text))

        return await run_off_loop(answer, num_bytes=num_bytes)

    tokenize_schema = describe_body(schema.TokenizeRequest)
    detokenize_schema = describe_body(schema.DetokenizeRequest)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Return the tokenizer's special tokens (bos, eos, pad, unk) and the chat template."""
        return build_json_response(_build_info(context))

    for prefix in ("", "/v1"):
        router.post(f"{prefix}/tokenize", openapi_extra=tokenize_schema)(tokenize)
        router.post(f"{prefix}/detokenize", openapi_extra=detokenize_schema)(detokenize)
    return router


def _build_conversation(params: schema.TokenizeRequest) -> Conversation:
    return Conversation(
        messages=params.messages or [],
        tools=params.tools or None,
        template_kwargs=params.chat_template_kwargs,
        add_generation_prompt=params.add_generation_prompt and not params.continue_final_message,
        continue_final_message=params.continue_final_message,
    )


def _build_info(context: ApiContext) -> schema.TokenizerInfo:
    engine = context.engine
    config, template = engine.tokenizer.config, engine.chat_template
    others = config.get("additional_special_tokens")
    return schema.TokenizerInfo(
        tokenizer_class=str(config.get("tokenizer_class") or "PreTrainedTokenizerFast"),
        model_max_length=engine.info.max_model_len,
        bos_token=token_text(config.get("bos_token")),
        eos_token=token_text(config.get("eos_token")),
        unk_token=token_text(config.get("unk_token")),
        pad_token=token_text(config.get("pad_token")),
        additional_special_tokens=[
            text
            for other in (others if isinstance(others, list) else ())
            if (text := token_text(other)) is not None
        ],
        chat_template=None if template is None else template.source,
    )


def _check_sizes(
    lists: Sequence[Sequence[int]], tokenizer: Tokenizer, *, max_model_len: int
) -> None:
    """Refuse more tokens or text than a prompt may have, because copying them holds the GIL."""
    count, allowed = sum(map(len, lists)), compute_max_tokens(max_model_len)
    if count > allowed:
        refuse("tokens", f"the list has {count} token ids; at most {allowed} are allowed")
    size = sum(len(tokenizer.token_bytes(token_id)) for ids in lists for token_id in ids)
    if size > (allowed := compute_max_chars(max_model_len)):
        refuse("tokens", f"the text of the tokens has {size} bytes; at most {allowed} are allowed")


def _check_vocabulary(lists: Sequence[Sequence[int]], *, vocab_size: int) -> None:
    for ids in lists:
        for extreme in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= extreme < vocab_size:
                refuse(
                    "tokens", f"{extreme} is not a token id; send ids from 0 to {vocab_size - 1}"
                )
