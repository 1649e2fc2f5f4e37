"""Requests of the Responses API."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from negamax.api.dialects.responses.client_tools import CLIENT_TOOLS, TOOL_SEARCH, is_run_by_client
from negamax.api.schemas.request_model import (
    RequestModel,
    check_type,
    describe,
    refuse,
    validate_at_most,
    validate_one_of,
)
from negamax.api.schemas.sampled_request import MAX_MESSAGES, StopStrings, TurnRequest
from negamax.api.schemas.structure import build_format_grammar
from negamax.api.schemas.thinking import EFFORTS, ThinkingChoice
from negamax.api.schemas.tools import (
    CallChoice,
    build_function_tool,
    check_call_choice,
    check_function,
    check_tool_count,
    read_allowed_tools,
)
from negamax.config.grammar import Grammar

ENCRYPTED_REASONING = "reasoning.encrypted_content"  # An accepted value of `include`.
LOGPROBS = "message.output_text.logprobs"  # An accepted value of `include`.
CUSTOM_INPUT = "input"  # Name of a custom tool's only argument.
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
}
MAX_ITEMS = 4 * MAX_MESSAGES
MAX_METADATA = 16  # Limit of metadata entries, as in OpenAI's API.
_FORMS = ("text", "json_object", "json_schema")
_SUMMARIES = ("auto", "concise", "detailed", "none")


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A tool that the client runs. The prompt shows the tool as the function `as_function`.

    `kind` is "function", "custom" or a key of `CLIENT_TOOLS`. A custom tool has one text argument.
    """

    name: str
    namespace: str | None
    kind: str
    as_function: dict[str, Any]
    is_deferred: bool = False  # If True, the prompt shows the tool only after a tool search.

    @property
    def shown_name(self) -> str:
        return str(build_shown_name(self.namespace, self.name))

    def is_called(self, name: object) -> bool:
        return name in (self.name, self.shown_name)


def build_shown_name(namespace: object, name: Any) -> Any:
    """Return the name of a tool with its namespace as prefix. Return an invalid name unchanged."""
    if isinstance(namespace, str) and namespace and isinstance(name, str) and name:
        return f"{namespace}.{name}"
    return name


def _check_input(value: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if value == "":
        refuse("input", "the input is empty; send text or at least one item")
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        refuse("input", f"the list has {len(value)} items; at most {MAX_ITEMS} are allowed")
    return value


class ReasoningConfig(RequestModel):
    """The field `reasoning`: the effort, and whether the answer contains a summary."""

    # How much the model thinks; templates may ignore the effort. "none" disables thinking.
    effort: Annotated[str, validate_one_of("reasoning.effort", EFFORTS)] | None = None
    # Any value other than "none" adds a summary that repeats the whole reasoning.
    summary: Annotated[str, validate_one_of("reasoning.summary", _SUMMARIES)] | None = None


class TextConfig(RequestModel):
    """The field `text`: the format of the answer."""

    format: dict[str, Any] | None = None  # Object whose `type` is text, json_object or json_schema.
    verbosity: str | None = None  # The field has no effect.


class ResponsesRequest(TurnRequest):
    """A request to answer a list of items. The request may continue a stored response."""

    # A text, or at most 65,536 items of the conversation.
    input: Annotated[str | list[dict[str, Any]], AfterValidator(_check_input)]
    instructions: str | None = None  # System message that replaces earlier instructions.
    previous_response_id: str | None = None  # Id of the stored response to continue.
    store: bool = True  # Store the response on the server.
    background: bool = False  # Answer in the background; requires store=true.
    max_output_tokens: int | None = Field(default=None, ge=1)  # Limit of generated tokens.
    stop: StopStrings = Field(default_factory=list)  # Strings that end the answer.
    # `tools`: at most 1,024 functions, custom tools, namespaces, and other tools that clients run.
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] = "auto"  # A mode, a tool, or an allowed_tools object.
    parallel_tool_calls: bool = True  # False allows at most one call per answer.
    reasoning: ReasoningConfig = ReasoningConfig()  # Reasoning effort and kind of summary.
    text: TextConfig = TextConfig()  # Format of the answer.
    # `include` can add reasoning.encrypted_content and message.output_text.logprobs to the output.
    include: list[str] = Field(default_factory=list)
    # Likely tokens to list per position. Requires message.output_text.logprobs in `include`.
    top_logprobs: int = Field(default=0, ge=0)
    # The response repeats metadata. Keys have up to 64 and values up to 512 characters.
    metadata: Annotated[
        dict[
            Annotated[str, StringConstraints(max_length=64)],
            Annotated[str, StringConstraints(max_length=512)],
        ],
        Field(max_length=MAX_METADATA),
        validate_at_most("metadata", MAX_METADATA, "entries", of=dict),
    ] = Field(default_factory=dict)

    @cached_property
    def declared_tools(self) -> list[DeclaredTool]:
        return read_declared_tools(
            [(f"tools[{i}]", tool) for i, tool in enumerate(self.tools or ())]
        )

    def choice(self) -> tuple[list[dict[str, Any]] | None, CallChoice]:
        """Return the tools that the prompt shows, and which tools the model may or must call."""
        declared, mode, name = self.declared_tools, self.tool_choice, None
        allowed: dict[str, str] | None = None
        if isinstance(mode, dict):
            kind = mode.get("type")
            if kind == "allowed_tools":
                mode, names = read_allowed_tools(
                    mode, may_run_elsewhere=True, named_by_type=CLIENT_TOOLS
                )
                allowed = {}
                for called, place in names.items():
                    known = [tool.shown_name for tool in declared if tool.is_called(called)]
                    allowed.update(dict.fromkeys(known or [called], place))
            elif kind in ("function", "custom"):
                described = mode.get("function", mode)
                mode = "function"
                name = described.get("name") if isinstance(described, dict) else None
            elif kind in CLIENT_TOOLS:
                mode, name = "function", kind
            else:
                mode = str(kind)
        if mode not in ("auto", "none", "required", "function") or (
            mode == "function" and isinstance(self.tool_choice, str)
        ):
            kinds = f"a function, custom tool, {', '.join(CLIENT_TOOLS)}, or allowed_tools"
            allowed_modes = f"'auto', 'none', 'required', {kinds}"
            refuse("tool_choice", f"{describe(mode)} is not allowed; send {allowed_modes}")
        tools = None if mode == "none" else [tool.as_function for tool in declared] or None
        name = next((tool.shown_name for tool in declared if tool.is_called(name)), name)
        return tools, check_call_choice(
            mode, name, tools=tools, parallel=self.parallel_tool_calls, allowed=allowed
        )

    @property
    def thinking_choice(self) -> ThinkingChoice:
        return ThinkingChoice(effort=self.reasoning.effort)

    @property
    def grammar(self) -> Grammar | None:
        return build_format_grammar(self.text.format or {"type": "text"}, _FORMS, "text.format")

    @property
    def num_logprobs(self) -> int | None:
        """The number of likely tokens to list per position, or None without logprobs."""
        return self.top_logprobs if LOGPROBS in self.include else None


def read_declared_tools(placed: Sequence[tuple[str, dict[str, Any]]]) -> list[DeclaredTool]:
    """Return the tools that the prompt can show. `placed` has pairs of a path and a tool.

    The prompt can show functions, custom tools, tools in namespaces, and the shell, patch and
    search tools that clients run. Tools that run on OpenAI's servers are omitted.
    """
    declared: list[DeclaredTool] = []
    for where, tool in placed:
        if tool.get("type") != "namespace":
            declared += _read_tool(tool, where=where, namespace=None)
            continue
        namespace, inner = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str) or not isinstance(inner, list):
            refuse(where, "the value must have a name and a list of tools")
        for number, entry in enumerate(inner):
            place = f"{where}.tools[{number}]"
            declared += _read_tool(check_type(entry, dict, place), where=place, namespace=namespace)
    check_tool_count(len(declared))
    return declared


def _read_tool(tool: dict[str, Any], *, where: str, namespace: str | None) -> list[DeclaredTool]:
    kind = tool.get("type")
    if isinstance(kind, str) and is_run_by_client(tool):
        known = CLIENT_TOOLS[kind]
        given = {"name": kind, "description": known.description, "parameters": known.schema}
        if kind == TOOL_SEARCH:
            own = (name for name in ("description", "parameters") if tool.get(name) is not None)
            given.update({name: tool[name] for name in own})
        check_function(given, where=where)
        return [DeclaredTool(kind, None, kind, {"type": "function", "function": given})]
    if kind not in ("function", "custom"):
        if not isinstance(kind, str):
            allowed = "the name of a type, such as 'function'"
            refuse(f"{where}.type", f"{describe(kind)} is not allowed; send {allowed}")
        return []
    described = tool.get("function", tool)  # Some clients use the format of chat completions.
    if not isinstance(described, dict):
        refuse(f"{where}.function", "the value must be an object with a name")
    called = build_shown_name(namespace, described.get("name"))
    check_function({**described, "name": called}, where=where)
    is_custom = kind == "custom"
    function = build_function_tool(
        called,
        description=described.get("description"),
        parameters=_CUSTOM_PARAMETERS if is_custom else described.get("parameters"),
        is_strict=not is_custom and described.get("strict") is True,
    )
    is_deferred = described.get("defer_loading") is True
    return [DeclaredTool(described["name"], namespace, kind, function, is_deferred)]
