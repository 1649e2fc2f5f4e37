"""Answer prompts by the rules of a script instead of a model (`--script`).

A script is a TOML file of rules. The answer comes from the first rule that matches the prompt.
Scripts let you try a client, such as a coding agent with long prompts, without a GPU.
"""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from negamax.base.errors import ConfigError
from negamax.text.chat_template import ChatTemplate
from negamax.text.messages import normalize_messages
from negamax.text.parser.output_format import OutputFormat
from negamax.text.tokenizer import Tokenizer

BUNDLED_SCRIPTS = Path(__file__).parent.parent / "assets" / "scripts"

_MARK = "the-thinking-of-this-answer"


class ScriptedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer, and the conditions for it. A condition that is None is always true."""

    # "tool" requires tool results after the last answer, "user" requires only user messages
    role: Literal["user", "tool"] | None = None
    message: str | None = None  # regular expression to find in messages after the last answer
    prompt: str | None = None  # regular expression to find in the whole prompt
    thinking: str = ""
    content: str = ""
    calls: list[ScriptedCall] = msgspec.field(name="call", default_factory=list)

    def fits(self, prompt: str, *, role: str, message: str) -> bool:
        """Return whether the rule's conditions are true. `message`: text after the last answer."""
        return (
            self.role in (None, role)
            and (self.message is None or re.search(self.message, message) is not None)
            and (self.prompt is None or re.search(self.prompt, prompt) is not None)
        )


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rules: list[Rule] = msgspec.field(name="rule")
    context_length: int = 196_608  # limit of the tokens of prompt and output together
    tokens_per_second: float = 60.0  # output tokens per second of each stream


def read_script(name: str) -> Script:
    """Read the script in file `name`, or the bundled script `name`. Raises `ConfigError`."""
    bundled = BUNDLED_SCRIPTS / f"{name}.toml"
    file = bundled if re.fullmatch(r"\w+", name) and bundled.is_file() else Path(name)
    try:
        script = msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8-sig")), Script)
        for rule in script.rules:
            for pattern in (rule.message, rule.prompt):
                re.compile(pattern or "")
    except OSError as error:
        known = ", ".join(sorted(path.stem for path in BUNDLED_SCRIPTS.glob("*.toml")))
        raise ConfigError(
            f"--script is {name!r}, which cannot be read: {error.strerror}",
            hint=f"pass a TOML file, or the name of a bundled script: {known}",
        ) from None
    except (ValueError, re.error) as error:  # the file is not UTF-8, not TOML, or not a script
        raise ConfigError(f"the script {str(file)!r} is not valid: {error}") from None
    if not script.rules or script.context_length < 2 or not script.tokens_per_second > 0:
        raise ConfigError(
            f"the script {str(file)!r} needs at least one rule, a context_length of 2 or more and "
            f"a tokens_per_second above 0"
        )
    return script


class ScriptedAnswers:
    """Answers prompts by the rules of a script. The model's chat template renders the answers."""

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        output_format: OutputFormat,
        eos_token_id: int,
    ) -> None:
        self._script = script
        self._tokenizer = tokenizer
        self._format = output_format
        self._eos = eos_token_id
        self._bodies = [_render_body(rule, template, output_format) for rule in script.rules]

    def answer(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the answer's tokens and the end token. The answer is empty if no rule fits."""
        prompt = self._tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        role, message = find_new_messages(prompt, self._format)
        for rule, body in zip(self._script.rules, self._bodies, strict=True):
            if rule.fits(prompt, role=role, message=message):
                return [*self._tokenizer.encode(self._open(rule, body, prompt)), self._eos]
        return [self._eos]

    def _open(self, rule: Rule, body: str, prompt: str) -> str:
        """Return the answer to `prompt`. `body`: the answer from the closing think tag on."""
        if self._format.opens_reasoning(prompt):
            return rule.thinking + body
        return body.partition(self._format.think_close)[2].lstrip("\n")


def find_new_messages(prompt: str, output_format: OutputFormat) -> tuple[str, str]:
    """Return the role and the text of the messages after the last answer."""
    turns = [turn.partition("\n") for turn in prompt.split(output_format.turn_open)[1:]]
    if turns and turns[-1][0] == output_format.assistant:
        turns.pop()  # drop the open turn of the assistant
    last_answer = max(
        (i for i, (role, _, _) in enumerate(turns) if role == output_format.assistant), default=-1
    )
    new = [(role, text) for role, _, text in turns[last_answer + 1 :] if role in ("user", "tool")]
    if not new:
        return "user", prompt
    role = "tool" if any(role == "tool" for role, _ in new) else "user"
    return role, "\n".join(text.partition(output_format.turn_close)[0] for _, text in new)


def _render_body(rule: Rule, template: ChatTemplate, output_format: OutputFormat) -> str:
    """Render the answer of `rule`, and return its text from the closing think tag on."""
    calls = [
        {
            "type": "function",
            "id": f"call_{index}",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(rule.calls)
    ]
    answer = {"role": "assistant", "content": rule.content, "reasoning_content": _MARK}
    asked = {"role": "user", "content": "?"}
    messages = normalize_messages([asked, {**answer, "tool_calls": calls} if calls else answer])
    text = template.render(messages, add_generation_prompt=False).rpartition(_MARK)[2]
    return text.rpartition(output_format.turn_close)[0]
