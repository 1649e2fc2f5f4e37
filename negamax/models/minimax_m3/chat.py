r"""The text format of reasoning and tool calls of the MiniMax-M3 family.

M stands for the marker `]<]minimax[>[`. A tokenizer encodes the marker as one or more tokens.

    <mm:think>reasoning</mm:think>content
    M<tool_call>\n
    M<invoke name="f">M<k>vM</k>M<list>M<item>1M</item>M</list>M</invoke>\nM</tool_call>

In a call, a tag without M is data. Elements nest: an object has one element per member, and an
array has one `item` element per value. `element_arguments` converts the elements. The reader
handles these mistakes of the models:

- A closing tag with a wrong name, possibly followed by the correct tag, ends a text value. A
  closing tag that matches no open element is dropped. A closing tag of an outer element, of the
  invoke or of the block also closes all open elements inside.
- If the closing tag of a text value is missing, the opening tag of a sibling in the schema ends the
  value. Any other opening tag in a string, and its closing tag, are data. A call block in a string
  and the invoke of an undeclared tool are also data, because files may describe this format.
- Without the marker, `<tool_call>`, invoke tags and their closing tags are tags only where the
  format requires a tag.
- A garbled invoke tag, even with a marker in it, calls the declared tool that it names.
- If the opening tag of an element is missing, the name in its closing tag is used.
- The reader also accepts a JSON object, or elements without markers, as arguments. Text outside
  elements is dropped if the invoke has elements; an invoke with only such text is not a call.
"""

import re
from collections.abc import Callable
from typing import Any

from negamax.config.grammar import refuse_grammar
from negamax.text.chat_family import ChatFamily
from negamax.text.grammar.json_schema import Schemas
from negamax.text.grammar.shapes import ArrayShape, Nodes, ObjectShape
from negamax.text.grammar.tag_formats import Format, const, optional, sequence
from negamax.text.grammar.tool_calls import CallStyle
from negamax.text.parser.element_arguments import ElementArguments
from negamax.text.parser.output_format import CallBlock, CallWriter, OutputFormat
from negamax.text.parser.schema_values import ToolSchemas
from negamax.text.parser.tag_lexer import (
    MAX_ATTRIBUTE_CHARS,
    TEXT,
    Lexeme,
    TagBeginnings,
    TagKind,
    TagPattern,
)
from negamax.text.parser.tag_names import tool_name

MARKER = "]<]minimax[>["
MAX_CALL_DEPTH = 6  # maximum depth of elements in the grammar of a call; deeper values are JSON

_BLOCK, _INVOKE = "tool_call", "invoke"
_NO_TAGS = (TEXT, TagKind.CUT)
_M = re.escape(MARKER)
_SPACE = r"\s{0,4}"  # White space between a marker and its tag, or at the end of a tag.
# `_SPLICE` matches a marker inside an invoke tag, and the text after the marker.
_SPLICE = rf"{_M}{_SPACE}<?[^<>]{{0,64}}"
_ATTRIBUTES = re.compile(r"""(?:\s+[\w:-]+\s*=\s*(?:"[^"]*"|'[^']*'))+\s*/?$""")
_SPLICED = re.compile(rf"{_M}{_SPACE}<?")
_PARTIAL_M = (
    "(?:" + "|".join(re.escape(MARKER[:length]) for length in range(len(MARKER) - 1, 0, -1)) + ")"
)


_STRUCTURE = (
    TagKind.INVOKE_OPEN, TagKind.BLOCK_OPEN, TagKind.INVOKE_CLOSE, TagKind.BLOCK_CLOSE,
)  # fmt: skip


class MiniMaxM3Block(CallBlock):
    __slots__ = ("_arguments",)

    def __init__(self, calls: CallWriter, **options: Any) -> None:
        super().__init__(calls, **options)
        self._arguments: ElementArguments | None = None  # arguments of the open call

    @staticmethod
    def is_bare_call(lexeme: Lexeme, schemas: ToolSchemas, *, at_line_start: bool) -> bool:
        """Return whether `lexeme` names a declared tool, at any position in its line."""
        return schemas.declares(_read_tool_name(lexeme.text, schemas))

    def take(self, lexeme: Lexeme) -> bool:
        arguments = self._arguments
        if arguments is None:
            return self._take_between_calls(lexeme)
        if lexeme.kind is TEXT:
            arguments.add_text(lexeme.text)
        has_ended = lexeme.kind not in _NO_TAGS and self._take_in_call(lexeme, arguments)
        if self._arguments is arguments:
            if not self._calls.is_announced and lexeme.kind is not TagKind.CUT:
                self._raw.append(lexeme.text)
            if arguments.lost:
                self._leave(arguments.lost + lexeme.text)
            elif not arguments.is_between_arguments:
                self._calls.announce()
        return has_ended

    def finish(self, *, is_truncated: bool) -> None:
        if self._arguments is not None:
            self._finish_call(self._arguments.stray)
        self._end_block()

    def _take_in_call(self, lexeme: Lexeme, arguments: ElementArguments) -> bool:
        tag = lexeme.text
        match lexeme.kind:
            case TagKind.PARAMETER_OPEN | TagKind.PARAMETER_CLOSE:
                _take_element(arguments, tag)
            case TagKind.INVOKE_OPEN if self._is_data(tag, arguments):
                arguments.quote(_INVOKE, tag)
            case TagKind.BLOCK_OPEN if arguments.is_in_string:
                arguments.quote(_BLOCK, tag)
            case TagKind.BLOCK_OPEN if arguments.lists(_BLOCK):
                arguments.open(_BLOCK, tag)
            case TagKind.INVOKE_CLOSE if arguments.may_close(_INVOKE):
                arguments.close(_INVOKE, tag)
            case TagKind.BLOCK_CLOSE if arguments.may_close(_BLOCK):
                arguments.close(_BLOCK, tag)
            case kind if kind in _STRUCTURE or arguments.is_between_arguments:
                return self._take_structure(lexeme)
            case _:
                arguments.add_text(tag)
        return False

    def _is_data(self, tag: str, arguments: ElementArguments) -> bool:
        is_declared = self._schemas.declares(self._read_tool_name(tag))
        return arguments.has_quotation or (arguments.is_in_string and not is_declared)

    def _take_structure(self, lexeme: Lexeme) -> bool:
        """Read a tag that ends the call, or that has no marker and is between arguments."""
        if lexeme.kind in (TagKind.INVOKE_CLOSE, TagKind.LOOSE_INVOKE_CLOSE):
            self._end_call(lexeme.text)
            if not self._opener:
                self._end_block()
            return not self._opener
        if lexeme.kind not in (*_STRUCTURE, TagKind.LOOSE_INVOKE_OPEN, TagKind.LOOSE_BLOCK_CLOSE):
            return False
        self._end_call()
        return self._take_between_calls(lexeme)

    def _read_tool_name(self, tag: str) -> str:
        return _read_tool_name(tag, self._schemas)

    def _begin_arguments(self, tool: str) -> None:
        schema = self._schemas.arguments(tool)
        self._arguments = ElementArguments(self._calls, schema, marker=MARKER)

    def _end_call(self, closer: str = "") -> None:
        """End the open call. A call with an unreadable argument stays text."""
        if self._arguments is None:
            return
        if self._arguments.end():
            self._arguments = None
        else:
            self._raw.append(closer)
            self._leave(self._arguments.lost)

    def _leave(self, text: str) -> None:
        self._leave_call(text)
        self._arguments = None


def _take_element(arguments: ElementArguments, tag: str) -> None:
    """Read the opening or closing tag of an element, whose name may begin or end with a slash."""
    inner = tag.removeprefix(MARKER).lstrip()[1:-1]
    if inner.startswith("/"):
        name = _read_name(inner[1:], lambda name: arguments.has_open(name) or arguments.lists(name))
        if not arguments.lists(f"/{name}") or arguments.has_open(name):
            arguments.close(name, tag)
            return
        inner = f"/{name}"
    name = _read_name(inner, arguments.lists)
    emptied = name.removesuffix("/").rstrip()  # the name if `tag` is self-closing, like `<a/>`
    is_empty = emptied != name and arguments.lists(emptied) and not arguments.lists(name)
    arguments.open(emptied if is_empty else name, tag)
    if is_empty:
        arguments.close(emptied, "")


def _read_name(inner: str, is_known: Callable[[str], bool]) -> str:
    """Return the element name in a tag; drop attributes unless a schema lists the whole text."""
    name = inner.strip()
    word = _ATTRIBUTES.sub("", name)
    return next(filter(is_known, (inner, name, word)), inner if word == name else word)


def _read_tool_name(tag: str, schemas: ToolSchemas) -> str:
    tag = tag.removeprefix(MARKER).strip()
    if MARKER not in tag:
        return tool_name([tag], schemas)
    parts = _SPLICED.split(tag)
    return tool_name(["".join(parts), " ".join(parts)], schemas)


class M3Calls(CallStyle):
    """The grammar of M3's tool calls, whose tags all begin with the text of the marker."""

    name = "m3"
    end_of_text = MARKER
    call_tags = f'{MARKER}<invoke name="{{}}">', f"{MARKER}</invoke>\n"
    argument_tags = f"{MARKER}<{{}}>", f"{MARKER}</{{}}>"
    free_key = r"[^<>/\s]", r"[^<>\"\n]", 63

    def block(self, calls: Format) -> Format:
        begin, end = f"{MARKER}<tool_call>\n", f"{MARKER}</tool_call>"
        return {"type": "tag", "begin": begin, "content": calls, "end": end}

    def embed_in_text(self, block: Format, *, once: bool, no_other_calls: bool) -> Format:
        # The parser also accepts `<invoke` without a marker, so the grammar excludes it from text.
        excludes = ["<invoke"] if no_other_calls else []
        triggers = [f"{MARKER}<tool_call>"]
        return {
            "type": "triggered_tags", "triggers": triggers, "tags": [block],
            "stop_after_first": once, "excludes": excludes
        }  # fmt: skip

    def any_argument(self, name: Format, value: Format) -> Format:
        opener = [const(f"{MARKER}<"), name, const(">")]
        return sequence([*opener, value, const(f"{MARKER}</"), name, const(">")])

    def nest(
        self, shape: ArrayShape | ObjectShape, schemas: Schemas, *, depth: int
    ) -> Format | None:
        if depth > MAX_CALL_DEPTH:
            return None
        if isinstance(shape, ObjectShape):
            return self.members(shape, schemas, depth=depth)

        def item(nodes: Nodes) -> Format:
            return self.argument("item", self.value(nodes, schemas, depth=depth + 1))

        most, length = shape.most, len(shape.first)
        rest: list[Format] = []
        if schemas.shapes(shape.others) and (most is None or most > length):
            least = max(0, shape.least - length)
            limits = {"min": least, "max": -1 if most is None else most - length}
            rest = [{"type": "repeat", **limits, "content": item(shape.others)}]
        elif shape.least > length:
            refuse_grammar("a schema requires more array items than it allows")
        for place in range(min(length, length if most is None else most) - 1, -1, -1):
            rest = [sequence([item(shape.first[place]), *rest])]
            if place >= shape.least:
                rest = [optional(rest[0])]
        return rest[0] if rest else const("")


# The lexer accepts at most MAX_ATTRIBUTE_CHARS characters between the angle brackets of a tag.
_INSIDE = rf"[^<>]{{0,{MAX_ATTRIBUTE_CHARS}}}"
_AFTER_SLASH = rf"[^<>]{{0,{MAX_ATTRIBUTE_CHARS - 1}}}"
_AFTER_INVOKE = rf"[^<>]{{0,{MAX_ATTRIBUTE_CHARS - 6}}}"
_QUOTED = rf"\s+name\s*=\s*\"(?:(?!</?mm:think>)[^\"\n]){{0,{MAX_ATTRIBUTE_CHARS}}}"
_HELD = rf"{_QUOTED}(?:\"\s{{0,4}})?\Z"
_INVOKE_SPLICED = r"<invoke(?=[\s\]])[^<>]{0,64}"

MINIMAX_M3 = OutputFormat(
    name="minimax_m3",
    think_open="<mm:think>",
    think_close="</mm:think>",
    call_open=MARKER,
    literals={"<mm:think>": TagKind.THINK_OPEN, "</mm:think>": TagKind.THINK_CLOSE},
    patterns=(
        TagPattern(TagKind.BLOCK_OPEN, MARKER, rf"{_SPACE}<tool_call{_SPACE}>"),
        TagPattern(TagKind.BLOCK_CLOSE, MARKER, rf"{_SPACE}</tool_call{_SPACE}>"),
        TagPattern(TagKind.INVOKE_CLOSE, MARKER, rf"{_SPACE}</invoke{_SPACE}>"),
        TagPattern(TagKind.INVOKE_OPEN, MARKER, rf"{_SPACE}<invoke{_QUOTED}\"\s{{0,4}}>"),
        TagPattern(TagKind.HELD, MARKER, rf"{_SPACE}<invoke{_HELD}"),
        TagPattern(TagKind.INVOKE_OPEN, MARKER, rf"{_SPACE}<invoke(?=\s){_AFTER_INVOKE}>"),
        TagPattern(TagKind.INVOKE_OPEN, MARKER, rf"{_SPACE}{_INVOKE_SPLICED}(?:{_SPLICE}){{1,2}}>"),
        TagPattern(TagKind.PARAMETER_CLOSE, MARKER, rf"{_SPACE}</{_AFTER_SLASH}>"),
        TagPattern(TagKind.PARAMETER_OPEN, MARKER, rf"{_SPACE}<[^<>]{{1,{MAX_ATTRIBUTE_CHARS}}}>"),
        TagPattern(TagKind.LOOSE_BLOCK_OPEN, "<", "tool_call>"),
        TagPattern(TagKind.LOOSE_BLOCK_CLOSE, "<", "/tool_call>"),
        TagPattern(TagKind.LOOSE_INVOKE_CLOSE, "<", "/invoke>"),
        TagPattern(TagKind.LOOSE_INVOKE_OPEN, "<", rf"invoke(?=\s){_AFTER_INVOKE}>"),
        TagPattern(TagKind.LOOSE_THINK_CLOSE, "<", "/think>"),
        TagPattern(TagKind.LOOSE_THINK_CLOSE, "<", "/thinking>"),
    ),
    name_tags=(
        TagPattern(TagKind.INVOKE_OPEN, MARKER, '<invoke name="{}">'),
        TagPattern(TagKind.PARAMETER_OPEN, MARKER, "<{}>"),
        TagPattern(TagKind.PARAMETER_CLOSE, MARKER, "</{}>"),
    ),
    beginnings=TagBeginnings(
        words=(MARKER, "<tool_call", "</tool_call", "<invoke", "</invoke", "</thinking", "</think"),
        anchors=(MARKER, "<invoke"),
        growing=(
            rf"{_M}{_SPACE}(?:<{_INSIDE})?"
            rf"|{_M}{_SPACE}<invoke{_HELD}"
            rf"|{_M}{_SPACE}{_INVOKE_SPLICED}(?:{_SPLICE})?(?:{_SPLICE}|{_PARTIAL_M})"
            rf"|<invoke(?=\s){_AFTER_INVOKE}"
        ),
        inside=rf"(?:{_M}{_SPACE})?<[^<>]+",
    ),
    new_block=MiniMaxM3Block,
    may_think_again=True,
    call_closers=("</tool_call>", "</invoke>"),
)

MINIMAX_M3_FAMILY = ChatFamily(
    title="MiniMax-M3",
    output=MINIMAX_M3,
    call_style=M3Calls,
    closing_text=MINIMAX_M3.think_close,
    parser_names=("minimax_m3", "minimax-m3"),
    sees=("image", "video"),
)
