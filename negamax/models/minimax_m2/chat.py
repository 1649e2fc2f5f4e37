r"""The text format of reasoning and tool calls of MiniMax-M2, M2.1, M2.5 and M2.7.

    reasoning\n</think>\n\ncontent\n<minimax:tool_call>\n<invoke name="f">\n<parameter
    name="k">v</parameter>\n</invoke>\n </minimax:tool_call>

The model does not escape values, so a value may contain any text, even tags. The text after a
closer decides whether the closer is a tag or data. White space after a closer is skipped:
- `</parameter>` ends the value if a parameter, an invoke, another closer or the end of the output
  follows.
- `</invoke>` in an open value ends it if another invoke, the block closer or the end follows.
- `</minimax:tool_call>` in an open value ends it if another block or the end follows.
- An opener `<parameter name="k">` in an open value ends it only if the tool declares k and the call
  has no k yet. An opener that ends a value shows that the model omitted the value's closer.
The end of a truncated output does not end a value. A repeated parameter is written twice to the
JSON arguments, because common JSON readers use the last value. Repeated array parameters are
joined.

A name in a tag ends at its closing quote. A declared name may itself contain quotes and angle
brackets. Instead of parameters, the parser also accepts a JSON object or XML elements. A value
without an opener belongs to the only missing parameter. In an invoke with parameters, text outside
the parameters is dropped. If the text looks like an argument, the invoke stays text. An invoke
without any argument is not a call.
"""

import enum
import re
from collections.abc import Mapping
from typing import Any

from negamax.config.grammar import Marker
from negamax.text.chat_family import ChatFamily
from negamax.text.grammar.budget import Budget
from negamax.text.grammar.tag_formats import Format, const, marker, newlines, sequence
from negamax.text.grammar.tool_calls import CallStyle
from negamax.text.parser.call_recovery import (
    WRAPPERS,
    find_key,
    may_hold_argument,
    read_members,
    read_value,
)
from negamax.text.parser.output_format import CallBlock, CallWriter, OutputFormat
from negamax.text.parser.schema_values import TEXT_TYPES, ToolSchemas, WaitingMember, group_members
from negamax.text.parser.tag_lexer import (
    MAX_ATTRIBUTE_CHARS,
    TEXT,
    Lexeme,
    TagBeginnings,
    TagKind,
    TagPattern,
)
from negamax.text.parser.tag_names import argument_name, quoted_name, tool_name

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_CALL_OPEN, _CALL_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
# possibly garbled text between the name and the closing angle bracket of a tag
_ATTRIBUTES = rf"(?:[\s=:\"']|name)[^<>]{{0,{MAX_ATTRIBUTE_CHARS}}}"
_TAGS = "|".join((_THINK_OPEN, _THINK_CLOSE, _CALL_OPEN, _CALL_CLOSE))
_QUOTED = rf"\s+name\s*=\s*\"(?:(?!{_TAGS})[^\"\n]){{0,{MAX_ATTRIBUTE_CHARS}}}"
_HELD = rf"{_QUOTED}(?:\"\s{{0,4}})?\Z"
_NAMED_PARAMETER = re.compile(r"<parameter\s+name\b")

_OTHER_FORMS = (  # beginnings of arguments with broken tags or another syntax; {} is the name
    '<parameter name="{}"',
    'parameter name="{}"',
    'name="{}"',
    '{}">',
    "<{}>",
    '{{"{}"',
    '"{}"',
    "{}:",
)

# opening or closing tag of an element around all parameters
_WRAPPER = re.compile(rf"\s*</?({'|'.join(WRAPPERS)})>\s*")

# A call's closing tag ends the open value if one of these tags or CUT follows.
_AFTER_CALL = (TagKind.INVOKE_OPEN, TagKind.BLOCK_CLOSE)
_CLOSES_BEFORE = {
    TagKind.PARAMETER_CLOSE: (TagKind.PARAMETER_OPEN, TagKind.INVOKE_CLOSE, *_AFTER_CALL),
    TagKind.INVOKE_CLOSE: _AFTER_CALL,
    TagKind.BLOCK_CLOSE: (TagKind.BLOCK_OPEN,),
}


class _BlockState(enum.Enum):
    BLOCK = "between invokes"
    INVOKE = "between parameters"
    VALUE = "inside a parameter"


_BLOCK, _INVOKE, _VALUE = _BlockState.BLOCK, _BlockState.INVOKE, _BlockState.VALUE


class MiniMaxM2Block(CallBlock):
    __slots__ = (
        "_arguments", "_closer", "_forms", "_is_declared", "_is_written", "_key", "_keys",
        "_num_forms", "_schema", "_space", "_state", "_stray", "_unnamed", "_value", "_waiting",
        "_words", "_wrapper",
    )  # fmt: skip

    def __init__(self, calls: CallWriter, **options: Any) -> None:
        super().__init__(calls, **options)
        self._state = _BLOCK
        self._arguments = self._schema = self._schemas.arguments("")  # schemas: open call and value
        self._is_declared = False
        self._keys: set[str] = set()  # Names of the parameters of the open call so far.
        self._stray: list[str] = []  # Text after the last parameter of the open call.
        self._unnamed: list[str] = []  # Values without a parameter name in the open call.
        self._waiting: list[WaitingMember] = []  # Array parameters, written at the call's end.
        self._key = ""
        self._value: list[str] = []  # Text of the open value that is not written yet.
        self._is_written = False  # Whether the open value is streamed as a string.
        self._closer: Lexeme | None = None  # Last closing tag, if it may be text of the value.
        self._space: list[str] = []  # Text after `_closer`, which may be text of the value.
        self._forms: tuple[str, ...] = ()  # `_OTHER_FORMS` of the missing parameters.
        self._num_forms = 0  # len(_keys) when `_forms` was computed.
        self._wrapper = ""  # Name of the element around all parameters; "": none.
        self._words = ""  # Text of `_space` without its leading white space.

    @staticmethod
    def is_bare_call(lexeme: Lexeme, schemas: ToolSchemas, *, at_line_start: bool) -> bool:
        return at_line_start and schemas.declares(quoted_name(lexeme.text))

    def take(self, lexeme: Lexeme) -> bool:
        if self._closer is not None:
            if lexeme.kind is TEXT and self._may_follow(lexeme.text):
                return False
            self._decide(self._closer, before=lexeme)
        if self._state is _BLOCK:
            return self._take_between_calls(lexeme)
        if self._state is _INVOKE:
            return self._take_in_invoke(lexeme)
        self._take_in_value(lexeme)
        return False

    def finish(self, *, is_truncated: bool) -> None:
        """End the output. The text of an open string is kept; any other open value is dropped."""
        if self._words:
            self._keep_closer()
        if self._closer is not None and not is_truncated:
            ends_call = self._closer.kind is not TagKind.PARAMETER_CLOSE
            self._close_value()
            if ends_call:
                self._end_call()
        if self._state is not _BLOCK:
            self._finish_call("".join(self._stray))
        self._end_block()

    def _take_in_invoke(self, lexeme: Lexeme) -> bool:
        kind = lexeme.kind
        if kind in (TagKind.INVOKE_OPEN, TagKind.BLOCK_OPEN, TagKind.BLOCK_CLOSE):
            self._end_call()
            return self._take_between_calls(lexeme)
        is_raw = not self._calls.is_announced and kind is not TagKind.CUT
        if is_raw:
            self._raw.append(lexeme.text)
        if kind is TagKind.INVOKE_CLOSE:
            self._end_call()
            if not self._opener:
                self._end_block()
            return not self._opener
        if kind is TagKind.PARAMETER_OPEN:
            key = argument_name(lexeme.text, self._arguments)
            if not self._read_stray():
                self._unread += [] if is_raw else [lexeme.text]
            elif key:
                self._calls.announce()
                self._begin_value(key)
        elif kind is TagKind.PARAMETER_CLOSE:
            self._close_unopened()
        elif kind is not TagKind.CUT:
            self._stray.append(lexeme.text)
        return False

    def _take_in_value(self, lexeme: Lexeme) -> None:
        if lexeme.kind is TEXT:
            self._write(lexeme.text)
            return
        if lexeme.kind in _CLOSES_BEFORE:
            self._closer = lexeme
            return
        if lexeme.kind is TagKind.CUT:
            return
        if lexeme.kind is TagKind.PARAMETER_OPEN:
            key = quoted_name(lexeme.text)
            may_have = not self._is_declared or self._arguments.lists(key)
            if key and key not in self._keys and may_have:
                self._close_value()
                self._begin_value(key)
                return
        self._write(lexeme.text)

    def _decide(self, closer: Lexeme, *, before: Lexeme) -> None:
        """Decide whether `closer` ends the value. `before` is the lexeme after `closer`."""
        follows = before.kind is TagKind.CUT or before.kind in _CLOSES_BEFORE[closer.kind]
        if before.kind is TagKind.PARAMETER_OPEN:
            follows = (
                bool(quoted_name(before.text) or _NAMED_PARAMETER.match(before.text))
                or self._arguments.lists(argument_name(before.text, self._arguments))
            )  # fmt: skip
        if follows and not self._words:
            self._close_value()  # if `closer` is the call's closing tag, `before` ends the call
        else:
            self._keep_closer()

    def _may_follow(self, text: str) -> bool:
        """Read `text`, which follows the last closer. Return False if the closer is data.

        The closer ends the value if the text after it begins an argument that the tool declares and
        the call does not have yet, in a form of `_OTHER_FORMS`. White space alone decides nothing.
        """
        assert self._closer is not None
        if not self._words and text.isspace():
            self._space.append(text)
            return True
        words = self._words + text if self._words else text.lstrip()
        if self._closer.kind is not TagKind.PARAMETER_CLOSE or not self._is_declared:
            return False
        if len(self._keys) != self._num_forms:
            self._num_forms = len(self._keys)
            keys = self._arguments.names - self._keys
            forms = [form.format(key) for key in keys for form in _OTHER_FORMS]
            self._forms = (*forms, f"</{self._wrapper}>") if self._wrapper else tuple(forms)
        if words.startswith(self._forms):
            self._close_value()
            self._stray.append(words)
            return True
        if not any(form.startswith(words) for form in self._forms):
            return False
        self._words = words
        self._space.append(text)
        return True

    def _keep_closer(self) -> None:
        """Add the closer, which was data, and the text after it to the value."""
        assert self._closer is not None
        text = self._closer.text + "".join(self._space)
        self._forget_closer()
        self._write(text)

    def _forget_closer(self) -> None:
        self._closer = None
        self._space = []
        self._words = ""

    def _read_tool_name(self, tag: str) -> str:
        return tool_name([tag], self._schemas)

    def _begin_arguments(self, tool: str) -> None:
        self._arguments = self._schemas.arguments(tool)
        self._is_declared = self._schemas.declares(tool)
        self._keys, self._stray, self._unnamed, self._waiting = set(), [], [], []
        self._num_forms, self._wrapper = 0, ""
        self._state = _INVOKE

    def _end_call(self) -> None:
        """End the open call. A call with an unreadable argument stays text."""
        if not self._read_stray(is_last=True):
            return
        if self._unnamed:
            key = self._arguments.missing(self._keys)
            if not key or len(self._unnamed) > 1:
                self._leave("".join(self._unnamed))
                return
            self._calls.member(key, read_value(self._unnamed[0], self._arguments.member(key)))
        for key, value in group_members(self._waiting):
            self._calls.member(key, value)
        self._calls.end_call()
        self._state = _BLOCK

    def _leave(self, text: str) -> None:
        self._leave_call(text)
        self._state = _BLOCK

    def _read_stray(self, *, is_last: bool = False) -> bool:
        """Read the text after the last parameter. Return False if this text ended the call."""
        text, self._stray = "".join(self._stray), []
        if not text.strip():
            return True
        wrapper = _WRAPPER.fullmatch(text)
        if wrapper:
            self._wrapper = wrapper[1]
            return True
        members = read_members(text, self._arguments)
        if members is not None and not self._keys.intersection(members):
            for key, value in members.items():
                self._keys.add(key)
                self._calls.member(key, value)
            return True
        is_all = is_last and not self._calls.is_announced and not self._unnamed
        is_all = is_all and (bool(self._arguments.names) or not self._is_declared)
        if is_all or may_hold_argument(text, self._arguments):
            self._leave(text)
            return False
        return True

    def _close_unopened(self) -> None:
        """Read a parameter closer that has no opener."""
        text, self._stray = "".join(self._stray), []
        if not text.strip():
            return  # drop white space or a repeated closing tag
        key, value = find_key(text, self._arguments, self._keys)
        if key:
            self._calls.announce()
            self._begin_value(key)
            self._write(value)
            self._close_value()
        elif may_hold_argument(value, self._arguments):
            self._leave(text)
        else:
            self._unnamed.append(value.strip("\n"))

    def _begin_value(self, key: str) -> None:
        self._key = key
        self._keys.add(key)
        self._schema = self._arguments.member(key)
        self._state = _VALUE

    def _write(self, text: str) -> None:
        """Add `text` to the value. Stream a string value unless it may still become null."""
        if self._is_written:
            self._calls.string_text(text)
            return
        self._value.append(text)
        types = self._schema.types
        if not types <= TEXT_TYPES:
            return
        text = "".join(self._value)
        if "null" in types and "null".startswith(text):
            return
        self._calls.open_string(self._key)
        self._calls.string_text(text)
        self._value = []
        self._is_written = True

    def _close_value(self) -> None:
        text = "".join(self._value)
        if self._is_written:
            self._calls.close_string()
        else:
            value = read_value(text, self._schema)
            if "array" in self._schema.types:
                is_array = value.startswith("[")
                items = value[1:-1] if is_array else read_value(text, self._schema.item(0))
                self._waiting.append(WaitingMember(self._key, value, items))
            else:
                self._calls.member(self._key, value)
        self._value = []
        self._is_written = False
        self._forget_closer()
        self._state = _INVOKE


class M2Calls(CallStyle):
    """The grammar of M2's tool calls. Tags in `tag_ids` are single tokens."""

    name = "m2"
    end_of_text = "</parameter>"
    free_key = '[^"\\n]', '[^"\\n]', None
    call_tags = '<invoke name="{}">\n', "</invoke>\n"
    argument_tags = '<parameter name="{}">', "</parameter>\n"
    lead = newlines(3)

    def __init__(
        self, tag_ids: Mapping[str, int] | None = None, budget: Budget | None = None
    ) -> None:
        super().__init__(tag_ids, budget)
        tags = (_CALL_OPEN, _CALL_CLOSE, _THINK_OPEN, _THINK_CLOSE)
        self._open, self._close, *self._think = (Marker(tag, self.tag_ids.get(tag)) for tag in tags)
        self._has_ids = self._open.token_id is not None and self._close.token_id is not None

    def block(self, calls: Format) -> Format:
        tags = (self._open, self._close)
        begin, end = (marker(tag) if self._has_ids else tag.text for tag in tags)
        content = sequence([const("\n"), calls])
        return {"type": "tag", "begin": begin, "content": content, "end": end}

    def embed_in_text(self, block: Format, *, once: bool, no_other_calls: bool) -> Format:
        shared: Format = {"tags": [block], "stop_after_first": once}
        if not self._has_ids:
            return {"type": "triggered_tags", "triggers": [self._open.text], **shared}
        others = [tag.token_id for tag in (self._close, *self._think) if tag.token_id is not None]
        tokens = {"trigger_tokens": [self._open.token_id], "exclude_tokens": others}
        return {"type": "token_triggered_tags", **tokens, **shared}

    def any_argument(self, name: Format, value: Format) -> Format:
        opener = [const('<parameter name="'), name, const('">')]
        return sequence([*opener, value, const("</parameter>\n")])


MINIMAX_M2 = OutputFormat(
    name="minimax_m2",
    think_open=_THINK_OPEN,
    think_close=_THINK_CLOSE,
    call_open=_CALL_OPEN,
    literals={
        _THINK_OPEN: TagKind.THINK_OPEN,
        _THINK_CLOSE: TagKind.THINK_CLOSE,
        _CALL_OPEN: TagKind.BLOCK_OPEN,
        _CALL_CLOSE: TagKind.BLOCK_CLOSE,
    },
    patterns=(
        TagPattern(TagKind.INVOKE_OPEN, "<", rf"invoke{_QUOTED}\"\s{{0,4}}>"),
        TagPattern(TagKind.PARAMETER_OPEN, "<", rf"parameter{_QUOTED}\"\s{{0,4}}>"),
        TagPattern(TagKind.HELD, "<", rf"(?:invoke|parameter){_HELD}"),
        TagPattern(TagKind.INVOKE_OPEN, "<", rf"invoke{_ATTRIBUTES}>"),
        TagPattern(TagKind.INVOKE_CLOSE, "<", "/invoke>"),
        TagPattern(TagKind.PARAMETER_OPEN, "<", rf"parameter{_ATTRIBUTES}>"),
        TagPattern(TagKind.PARAMETER_CLOSE, "<", "/parameter>"),
        TagPattern(TagKind.LOOSE_THINK_CLOSE, "<", "/thinking>"),
        TagPattern(TagKind.LOOSE_THINK_CLOSE, "<", "/mm:think>"),
    ),
    name_tags=(
        TagPattern(TagKind.INVOKE_OPEN, "<", 'invoke name="{}">'),
        TagPattern(TagKind.PARAMETER_OPEN, "<", 'parameter name="{}">'),
    ),
    beginnings=TagBeginnings(
        words=(
            *("<invoke", "</invoke", "<invokename", "<parameter", "</parameter", "<parametername"),
            *("</thinking", "</mm:think"),
        ),
        anchors=("<invoke", "<parameter"),
        growing=rf"<(?:invoke|parameter)(?:{_ATTRIBUTES}|{_HELD})",
        inside=r"<(?:invoke|parameter)(?:[\s=:\"']|name)[^<>]*",
    ),
    new_block=MiniMaxM2Block,
    may_think_again=False,
    call_closers=("</invoke>",),
)

MINIMAX_M2_FAMILY = ChatFamily(
    title="MiniMax-M2",
    output=MINIMAX_M2,
    call_style=M2Calls,
    closing_text=f"\n{_THINK_CLOSE}\n\n",
    token_tags=frozenset(MINIMAX_M2.literals),
    always_thinks=True,
    parser_names=("minimax_m2", "minimax-m2", "minimax"),
    append_names=("minimax_m2_append_think", "minimax-append-think"),
)
