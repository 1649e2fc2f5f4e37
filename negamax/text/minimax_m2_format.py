r"""How the MiniMax-M2 family (M2, M2.1, M2.5, M2.7) writes thinking and tool calls.

    reasoning\n</think>\n\ncontent\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="k">v</parameter>\n</invoke>\n
    </minimax:tool_call>

Nothing is escaped, so a value may contain anything, closers included. What follows a closer decides (white space aside):
- `</parameter>` ends the value before a parameter, an invoke, either closer, or the end of the output; else it is data;
- `</invoke>` in an open value ends it before another invoke, the block closer or the end; `</minimax:tool_call>` before another
  block or the end; else they are data;
- an opener `<parameter name="k">` in an open value ends it only when k was declared and not given yet (a forgotten closer).
A parameter given twice is written twice: every common JSON reader takes the last one, streamed or not.
"""

from __future__ import annotations

import enum
import re

from negamax.text.output_parser import CallWriter, OutputFormat
from negamax.text.schema_values import TEXT_TYPES, ToolSchemas, json_value
from negamax.text.tag_lexer import MAX_ATTRIBUTE_CHARS, Lexeme, TagKind, TagPattern, literal_beginning
from negamax.text.tokenizer import Tokenizer

_ATTRIBUTES = rf"\s[^<>]{{0,{MAX_ATTRIBUTE_CHARS}}}"
_QUOTED_NAME = re.compile(r"""\sname\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_NAMED_PARAMETER = re.compile(r"<parameter\s+name\b")
_LOOSE_EDGES = " \t\r\n=\"'"

# For each closer met in an open value: what must follow for it to be one. The end of the output always does.
_CLOSES_BEFORE = {
    TagKind.PARAMETER_CLOSE: (TagKind.PARAMETER_OPEN, TagKind.INVOKE_OPEN, TagKind.INVOKE_CLOSE, TagKind.BLOCK_CLOSE),
    TagKind.INVOKE_CLOSE: (TagKind.INVOKE_OPEN, TagKind.BLOCK_CLOSE),
    TagKind.BLOCK_CLOSE: (TagKind.BLOCK_OPEN,),
}


class _State(enum.Enum):
    BLOCK = "between invokes"
    INVOKE = "between parameters"
    VALUE = "inside a parameter"


class MiniMaxM2Block:
    """One call block, from its opener on. Fed with lexemes by the parser, its single writer."""

    def __init__(self, calls: CallWriter, *, schemas: ToolSchemas, has_opener: bool) -> None:
        """`has_opener` is False for a bare `<invoke …>` without the block around it; such a block ends with that invoke."""
        self._calls = calls
        self._schemas = schemas
        self._has_opener = has_opener
        self._state = _State.BLOCK
        self._tool = ""
        self._keys: set[str] = set()  # parameters of the open call, the current one included
        self._key = ""
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []  # text of the open value that is not written yet
        self._is_written = False  # whether the open value has begun to stream as a string
        self._closer: Lexeme | None = None  # met in the open value, still undecided
        self._space: list[str] = []  # white space after it

    def take(self, lexeme: Lexeme) -> bool:
        """Process one lexeme; True when it ended the block."""
        if self._closer is not None:
            if lexeme.kind is TagKind.TEXT and lexeme.text.isspace():
                self._space.append(lexeme.text)
                return False
            self._decide(self._closer, before=lexeme)
        match self._state:
            case _State.BLOCK:
                return self._take_in_block(lexeme)
            case _State.INVOKE:
                return self._take_in_invoke(lexeme)
            case _State.VALUE:
                self._take_in_value(lexeme)
                return False

    def finish(self) -> None:
        """The output is over: a string keeps what came of it, any other open value is dropped, and the JSON is closed."""
        if self._closer is not None:
            self._close_value()
        elif self._is_written:
            self._calls.close_string()
        if self._state is not _State.BLOCK:
            self._end_call()

    def _take_in_block(self, lexeme: Lexeme) -> bool:
        if lexeme.kind is TagKind.INVOKE_OPEN:
            self._begin_call(lexeme)
        return lexeme.kind is TagKind.BLOCK_CLOSE

    def _take_in_invoke(self, lexeme: Lexeme) -> bool:
        if lexeme.kind is TagKind.PARAMETER_OPEN:
            key = _tag_name(lexeme.text)
            if key:
                self._begin_value(key)
        elif lexeme.kind is TagKind.INVOKE_OPEN:
            self._end_call()
            self._begin_call(lexeme)
        elif lexeme.kind in (TagKind.INVOKE_CLOSE, TagKind.BLOCK_CLOSE):
            self._end_call()
            return lexeme.kind is TagKind.BLOCK_CLOSE or not self._has_opener
        return False

    def _take_in_value(self, lexeme: Lexeme) -> None:
        if lexeme.kind in _CLOSES_BEFORE:
            self._closer = lexeme
            return
        if lexeme.kind is TagKind.CUT:
            return
        if lexeme.kind is TagKind.PARAMETER_OPEN:
            key = _quoted_name(lexeme.text)
            if key and key not in self._keys and self._may_have(key):
                self._close_value()
                self._begin_value(key)
                return
        self._write(lexeme.text)

    def _decide(self, closer: Lexeme, *, before: Lexeme) -> None:
        """Settle the undecided closer by what follows it, `before`, and go to the state it leads to."""
        follows = before.kind is TagKind.CUT or before.kind in _CLOSES_BEFORE[closer.kind]
        if before.kind is TagKind.PARAMETER_OPEN:
            follows = bool(_quoted_name(before.text) or _NAMED_PARAMETER.match(before.text))
        if not follows:
            text = closer.text + "".join(self._space)
            self._forget_closer()
            self._write(text)
            return
        self._close_value()  # if it was another closer, what follows ends the call too

    def _forget_closer(self) -> None:
        self._closer = None
        self._space = []

    def _begin_call(self, lexeme: Lexeme) -> None:
        self._tool = _tool_name(lexeme.text, self._schemas)
        self._keys = set()
        if self._tool:
            self._calls.start_call(self._tool)
            self._state = _State.INVOKE

    def _end_call(self) -> None:
        self._calls.end_call()
        self._state = _State.BLOCK

    def _may_have(self, key: str) -> bool:
        return not self._schemas.declares(self._tool) or self._schemas.declares_parameter(self._tool, key)

    def _begin_value(self, key: str) -> None:
        self._key = key
        self._keys.add(key)
        self._types = self._schemas.parameter_types(self._tool, key)
        self._state = _State.VALUE

    def _write(self, text: str) -> None:
        """Add `text` to the open value; a string goes out at once, unless it may still turn out to be the word null."""
        if self._is_written:
            self._calls.string_text(text)
            return
        self._value.append(text)
        if not self._types <= TEXT_TYPES:
            return
        text = "".join(self._value)
        if "null" in self._types and "null".startswith(text.lower()):
            return
        self._calls.open_string(self._key)
        self._calls.string_text(text)
        self._value = []
        self._is_written = True

    def _close_value(self) -> None:
        if self._is_written:
            self._calls.close_string()
        else:
            self._calls.member(self._key, json_value("".join(self._value), self._types))
        self._value = []
        self._is_written = False
        self._forget_closer()
        self._state = _State.INVOKE


def _quoted_name(tag: str) -> str:
    """The name attribute of a tag, or "" where it is not written as it should be."""
    match = _QUOTED_NAME.search(tag)
    return (match[1] or match[2] or "") if match else ""


def _attribute_text(tag: str) -> str:
    """What stands in a tag after its first word, without quotes and equals signs at the edges."""
    return "".join(tag.removesuffix(">").split(None, 1)[1:]).strip(_LOOSE_EDGES)


def _tag_name(tag: str) -> str:
    """The name in a tag, also where the model lost a quote or the equals sign: `<invoke name get_weather">`."""
    return _quoted_name(tag) or _attribute_text(tag).removeprefix("name").strip(_LOOSE_EDGES)


def _tool_name(tag: str, schemas: ToolSchemas) -> str:
    """As `_tag_name`, but where a declared name and nothing else stands in the tag, it is that one."""
    bare = _attribute_text(tag)
    return bare if schemas.declares(bare) else _tag_name(tag)


def _is_bare_call(lexeme: Lexeme, schemas: ToolSchemas) -> bool:
    return schemas.declares(_quoted_name(lexeme.text))


def _opener(kind: TagKind, *, word: str) -> TagPattern:
    return TagPattern(kind, whole=f"{word}{_ATTRIBUTES}>", beginning=literal_beginning(word, then=f"(?:{_ATTRIBUTES})?"))


def _closer(kind: TagKind, *, text: str) -> TagPattern:
    return TagPattern(kind, whole=text, beginning=literal_beginning(text))


MINIMAX_M2 = OutputFormat(
    name="minimax_m2",
    literals={
        "<think>": TagKind.THINK_OPEN,
        "</think>": TagKind.THINK_CLOSE,
        "<minimax:tool_call>": TagKind.BLOCK_OPEN,
        "</minimax:tool_call>": TagKind.BLOCK_CLOSE,
    },
    patterns=(
        _opener(TagKind.INVOKE_OPEN, word="<invoke"),
        _closer(TagKind.INVOKE_CLOSE, text="</invoke>"),
        _opener(TagKind.PARAMETER_OPEN, word="<parameter"),
        _closer(TagKind.PARAMETER_CLOSE, text="</parameter>"),
    ),
    first_chars="<",
    new_block=MiniMaxM2Block,
    is_bare_call=_is_bare_call,
)


def tag_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The token ids of the format's tags, by text; tags that `tokenizer` has no token for are left out."""
    found = {tag: tokenizer.token_id(tag) for tag in MINIMAX_M2.literals}
    return {tag: token_id for tag, token_id in found.items() if token_id is not None}


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends inside an open think block, so that the answer begins there (M2's templates always do)."""
    return prompt.rstrip("\n").endswith("<think>")
