"""A chat with an engine in this process."""

import asyncio
import secrets
from typing import Any

from negamax.api.common.choice_reader import ChoiceReader, ReadingRules
from negamax.api.common.conversation import Conversation, PromptBuilder
from negamax.cli.chat_session import ChatInput, Show, TokenCounts
from negamax.engine.client.output import RequestOutput
from negamax.engine.client.supervisor import EngineSupervisor
from negamax.models.chat_format import ChatFormat
from negamax.options.engine import EngineOptions


class EngineBackend:
    """A running engine that answers one chat."""

    def __init__(self, supervisor: EngineSupervisor, runner: asyncio.Runner) -> None:
        """Create the backend from a running engine. Only `start` calls this method."""
        engine = supervisor.engine
        self.model = engine.info.served_model_name
        self._supervisor = supervisor
        self._runner = runner
        self._engine = engine
        self._answering: asyncio.Task[Any] | None = None
        self._chat_format = ChatFormat.of_model(
            engine.info.architecture, tokenizer=engine.tokenizer, template=engine.chat_template
        )
        self._prompts = PromptBuilder(
            engine.tokenizer, self._chat_format, max_model_len=engine.info.max_model_len
        )

    @classmethod
    def start(cls, options: EngineOptions, runner: asyncio.Runner) -> "EngineBackend":
        """Start an engine with the model. Raises the errors of `EngineSupervisor.start`."""
        return cls(runner.run(EngineSupervisor.start(options)), runner)

    def answer(self, prompt: ChatInput, show: Show) -> TokenCounts:
        return self._runner.run(self._answer(prompt, show))

    def shutdown(self) -> None:
        """Cancel an answer that a signal interrupted, and stop the engine."""
        self._runner.run(self._shutdown())

    async def _shutdown(self) -> None:
        if self._answering is not None and not self._answering.done():
            self._answering.cancel()
            await asyncio.wait([self._answering])
        await self._supervisor.shutdown()

    async def _answer(self, given: ChatInput, show: Show) -> TokenCounts:
        self._answering = asyncio.current_task()
        conversation = Conversation(messages=given.messages, tools=given.tools)
        prompt = await self._prompts.chat(conversation, num_bytes=0)
        rules = ReadingRules(tools=given.tools, may_call=bool(given.tools))
        reader = ChoiceReader(self._chat_format, prompt=prompt, rules=rules)
        request_id = f"chat-{secrets.token_hex(8)}"
        generation = self._engine.generate(prompt.token_ids, given.sampling, request_id=request_id)
        counts = TokenCounts(len(prompt.token_ids), 0, 0)

        def take(_: int, output: RequestOutput) -> None:
            nonlocal counts
            cached, written = output.num_cached_tokens, output.num_output_tokens
            counts = TokenCounts(output.num_prompt_tokens, cached, written)
            show(reader.push(output))

        await generation.run(take)
        return counts
