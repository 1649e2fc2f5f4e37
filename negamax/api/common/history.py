"""Collect the messages of a conversation with their paths in the client's request."""

from dataclasses import dataclass, field
from typing import Any

from negamax.api.common.thought_signature import HiddenThoughts


@dataclass(frozen=True, slots=True)
class HiddenThought:
    """A thought packed into `signature`, and the text to use if `signature` contains no thought."""

    signature: str
    otherwise: str = ""


@dataclass(slots=True)
class AssistantParts:
    """The parts of one assistant message. Only the builder of the history changes this object."""

    reasoning: list[str | HiddenThought] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    _is_text_last: bool = False

    def add_reasoning(self, thought: str | HiddenThought) -> None:
        self._is_text_last = False
        if thought:
            self.reasoning.append(thought)

    def add_text(self, text: str, *, is_apart: bool = False) -> None:
        """Add text. The text begins a paragraph if `is_apart`, or if the last part is not text."""
        joins = self._is_text_last and not is_apart
        if text:
            self.texts.append(text if joins or not self.texts else f"\n\n{text}")
        self._is_text_last = True

    def add_call(self, call_id: Any, name: Any, arguments: Any) -> None:
        """Add a tool call, which is checked later together with all messages."""
        self._is_text_last = False
        self.calls.append(
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        )

    def message(self, thoughts: HiddenThoughts | None = None, *, place: str = "") -> dict[str, Any]:
        """Build the message at path `place`. `thoughts` decodes hidden thoughts of the message."""
        texts: list[str] = []
        for thought in self.reasoning:
            if not isinstance(thought, HiddenThought):
                texts.append(thought)
                continue
            hidden = None if thoughts is None else thoughts.unpack(thought.signature, param=place)
            texts.append(hidden or thought.otherwise)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts)}
        # Without this field, `normalize_messages` would search the content for reasoning.
        message["reasoning_content"] = "\n\n".join(text for text in texts if text)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


@dataclass(slots=True)
class History:
    """Messages and their paths in the request. Only the history's builder changes this object."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    # index in `messages`, and parts, of each message that has hidden thoughts
    _hidden: list[tuple[int, AssistantParts]] = field(default_factory=list)

    @property
    def is_in_loop(self) -> bool:
        """Whether the last message calls tools or is a tool result."""
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "tool" or "tool_calls" in last

    def add(self, message: dict[str, Any], *, place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def add_assistant(self, parts: AssistantParts, *, place: str) -> None:
        if any(isinstance(thought, HiddenThought) for thought in parts.reasoning):
            self._hidden.append((len(self.messages), parts))
        self.add(parts.message(), place=place)

    def reveal(self, thoughts: HiddenThoughts) -> None:
        """Decode the hidden thoughts that the prompt shows. Raises the errors of `unpack`."""
        users = (index for index, message in enumerate(self.messages) if message["role"] == "user")
        last_user = max(users, default=-1)
        for index, parts in self._hidden:
            if index > last_user or thoughts.shows_earlier:
                self.messages[index] = parts.message(thoughts, place=self.places[index])


def collect_texts(parts: object) -> list[str]:
    """Return the texts of message parts, or an empty list if `parts` is not a list."""
    texts = [
        part.get("text")
        for part in (parts if isinstance(parts, list) else ())
        if isinstance(part, dict)
    ]
    return [text for text in texts if isinstance(text, str)]
