"""Run plans without a model: every sequence gets the tokens of a scripted answer."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from negamax.base.errors import ConfigError
from negamax.engine.core.executor import Executor, Results
from negamax.engine.core.source import ModelSource
from negamax.models.registry import find_chat_family
from negamax.options.engine import EngineOptions
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import GrammarBitmask, StepPlan, StepResult, TokenLogprobs
from negamax.text.chat_template import ChatTemplate
from negamax.text.script import Script, ScriptedAnswers
from negamax.text.tokenizer import Tokenizer
from negamax.worker.config import DebugCommand, DebugResult, WorkerReady

NUM_WINDOWS = 8  # Number of sequences of full context length that fit in the KV cache.


@dataclass
class _Row:
    prompt: list[int]
    answer: list[int]
    sampling: SamplingParams
    num_computed: int


class ScriptedExecutor(Executor):
    """Returns the tokens of scripted answers, at the speed that the script sets."""

    def __init__(
        self, script: Script, source: ModelSource, options: EngineOptions, *, block_size: int
    ) -> None:
        template_folder = source.tokenizer_folder
        template = ChatTemplate.from_folder(template_folder)
        if template is None:
            raise ConfigError(
                "--script needs a model with a chat template, and this model has none",
                hint="use a model that is part of Negamax, such as nano",
            )
        self._eos = source.generation.eos_token_ids[0]
        self._answers = ScriptedAnswers(
            script,
            tokenizer=Tokenizer.from_folder(template_folder),
            template=template,
            output_format=find_chat_family(source.spec.architecture).output,
            eos_token_id=self._eos,
        )
        self._step_seconds = 1.0 / script.tokens_per_second
        self._rows: dict[int, _Row] = {}
        self._due = 0.0  # Monotonic second at which the latest step should end.
        # `_masks`, `_postponed`: grammar masks by row, and rows with late masks, of the last plan.
        self._masks: dict[int, bytes] = {}
        self._postponed: list[int] = []
        self.ready = WorkerReady(
            num_kv_blocks=options.num_kv_blocks
            or NUM_WINDOWS * -(-script.context_length // block_size),
            dtype="none",
            device="script",
            kernels="",
            load_summary=f"{len(script.rules)} rules of the script {options.script} answer",
        )

    def launch(self, plans: Sequence[StepPlan]) -> Results:
        """Return a function that runs the plan after its bitmask has arrived."""
        (plan,) = plans
        self._masks, self._postponed = {}, []
        return partial(self._run, plan, self._masks, self._postponed)

    def send_bitmask(self, bitmask: GrammarBitmask, *, dp_rank: int = 0) -> None:
        for row, place in zip(bitmask.rows, bitmask.places, strict=True):
            self._masks[row] = bitmask.masks[place]
        self._postponed.extend(bitmask.postponed)

    def run_debug_command(self, command: DebugCommand) -> list[DebugResult]:
        return [DebugResult()]

    def shutdown(self, *, restarts: bool = False) -> None:
        self._rows.clear()

    def _run(
        self, plan: StepPlan, masks: dict[int, bytes], postponed: list[int]
    ) -> list[StepResult]:
        """Sleep until the step is due, then return the next token of every sampled row."""
        for new in plan.new_rows:
            prompt = new.token_ids[: new.prompt_len]
            answer = self._answers.answer(prompt)
            self._rows[new.slot] = _Row(prompt, answer, new.sampling, new.num_computed)
        now = time.monotonic()
        self._due = max(self._due + self._step_seconds, now)
        time.sleep(self._due - now)
        token_ids: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        for number, (slot, count) in enumerate(zip(plan.slots, plan.num_scheduled, strict=True)):
            row = self._rows[slot]
            start = row.num_computed
            row.num_computed += count - (number in postponed)
            if row.sampling.prompt_logprobs is not None:
                run = row.prompt[start + 1 : start + count + 1]
                prompt_logprobs[number] = [_make_certain(token) for token in run]
            if not plan.needs_sampling[number]:
                continue
            token = self._next(row, start + count - len(row.prompt), masks.get(number))
            if token is None:
                token, errors[number] = self._eos, "the grammar allows no token"
            if row.sampling.logprobs is not None:
                logprobs[len(token_ids)] = _make_certain(token)
            token_ids.append(token)
        return [StepResult(plan.step_id, token_ids, logprobs, prompt_logprobs, errors)]

    def _next(self, row: _Row, position: int, mask: bytes | None) -> int | None:
        """Return the answer's token at `position` if `mask` allows it, or else an allowed token."""
        token = row.answer[position] if position < len(row.answer) else self._eos
        if mask is None:
            return token
        allowed = chain((token, self._eos), range(8 * len(mask)))
        return next((one for one in allowed if mask[one // 8] >> one % 8 & 1), None)


def _make_certain(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, 0.0, 1, [token], [0.0])
