"""Convert streamed arguments, which are nested elements such as `<a><b>1</b></a>`, to JSON.

The schema decides the type of an element. Without a schema, an element with children is an object,
or an array if the name of every child is `item`. An element with text is a string, except for the
bare words true, false and null. White space and other text between elements are dropped. The
parser emits strings, and objects and arrays of a known type, before they are complete.

In a nested object, a member of unknown type is written at the object's end, because the values of a
repeated name become a list. If a member may be an array, its text is also written at the end,
because arrays and items of one name are joined. If an element after an array has the name of the
array, the element adds items to the array. If other elements separate the array from a later
element of its name, the whole array is written again at the end of the object. Any other member
with a repeated name is written twice. Common JSON readers use the last value.

If text in a container begins with the marker of the format's tags, the model omitted the opening
tag of an element, and the closing tag contains the element's name.
"""

import enum
from dataclasses import dataclass, field

from negamax.text.parser.call_recovery import may_hold_argument, read_members, read_value
from negamax.text.parser.output_format import CallWriter
from negamax.text.parser.schema_values import (
    CONTAINERS,
    TEXT_TYPES,
    ValueSchema,
    WaitingMember,
    group_members,
    json_string,
    write_object,
)

MAX_DEPTH = 64  # maximum levels of nested elements; a call with more levels is dropped
ITEM = "item"  # name of the elements that are items of an array

_MAX_UNDECIDED_CHARS = 64  # a longer text becomes a string if its type is still unknown
_WORDS = ("true", "false", "null")  # if the type is unknown, these words are not strings


class _Shape(enum.Enum):
    """The type of an element. The children of a TREE decide if it becomes an object or an array."""

    UNDECIDED = "text, or nothing yet"
    STRING = "a string that is being written"
    OBJECT = "object"
    ARRAY = "array"
    TREE = "tree"


_UNDECIDED, _STRING = _Shape.UNDECIDED, _Shape.STRING


@dataclass(slots=True)
class _Element:
    """An open element. The arguments of a call are an element without a name."""

    name: str
    key: str | None  # key of the element's value; None in an array
    schema: ValueSchema
    waits: bool  # whether the value is written only at the end of the container
    is_collected: bool  # whether the whole element is written when it ends
    shape: _Shape = _UNDECIDED
    text: list[str] = field(default_factory=list)  # text that is not written yet
    num_chars: int = 0
    is_blank: bool = True  # whether the text is empty or white space
    quoted: list[str] = field(default_factory=list)  # opening tags in the text that are data
    names: set[str] = field(default_factory=set)  # names of the members that have begun
    num_children: int = 0
    values: list[WaitingMember] = field(default_factory=list)  # members to write after all children
    is_written: bool = False  # whether the opening bracket is written
    may_be_over: bool = False  # whether a closing tag with a wrong name followed the last child
    is_implied: bool = False  # whether the element is an item without an item tag
    is_marked: bool = False  # whether the text begins with the call's tag marker
    mark: int = 0  # index of this element's opening bracket in the written arguments
    ended: "_Element | None" = None  # last member, if it is an array without its closing bracket
    resumed: "_Element | None" = None  # ended array of the same name that this element extends
    arrays: dict[str, str] = field(default_factory=dict)  # closed array's name -> JSON of its items
    waiting: set[str] = field(default_factory=set)  # names of `values`


class ElementArguments:
    """The arguments of one call, which only the open `CallBlock` changes."""

    __slots__ = ("_calls", "_marker", "_open", "_wrongly_closed", "lost")

    def __init__(self, calls: CallWriter, schema: ValueSchema, *, marker: str) -> None:
        self._calls = calls
        self._marker = marker
        self.lost = ""  # text of an argument that cannot be parsed
        arguments = _Element(
            "", None, schema, waits=False, is_collected=False, shape=_Shape.OBJECT, is_written=True
        )
        self._open: list[_Element] = [arguments]
        # name of the element that the previous tag closed, if that closing tag had another name
        self._wrongly_closed: str | None = None

    @property
    def is_in_text(self) -> bool:
        """Whether the innermost open element contains only text or nothing so far."""
        return self._open[-1].shape in (_UNDECIDED, _STRING)

    @property
    def is_in_string(self) -> bool:
        """Whether the innermost open element can only be a string."""
        return self.is_in_text and self._open[-1].schema.types <= TEXT_TYPES

    @property
    def is_between_arguments(self) -> bool:
        """Whether no element is open."""
        return len(self._open) == 1

    def may_close(self, name: str) -> bool:
        """Return whether a closing tag `name` ends an open element or a tag in the open text."""
        return name in self._open[-1].quoted or self.has_open(name)

    @property
    def stray(self) -> str:
        """Text after the last argument, outside all arguments."""
        return "".join(self._open[0].text)

    @property
    def has_quotation(self) -> bool:
        """Whether the open text contains opening tags whose closing tags are still missing."""
        return bool(self._open[-1].quoted)

    def lists(self, name: str) -> bool:
        """Return whether the schema of the innermost open element lists the member `name`."""
        return self._open[-1].schema.lists(name)

    def add_text(self, text: str) -> None:
        """Add text. The next tag decides whether the text of a container is dropped."""
        element = self._open[-1]
        if element.shape is _STRING:
            self._calls.string_text(text)
        else:
            if element.is_blank and not text.isspace():
                element.is_blank = False
                element.is_marked = text.lstrip().startswith(self._marker)
            element.text.append(text)
            if element.shape is _UNDECIDED:
                self._wrongly_closed = None
                element.num_chars += len(text)
                self._begin_string(element)

    def quote(self, name: str, tag: str) -> None:
        self.add_text(tag)
        if len(self._open[-1].quoted) < MAX_DEPTH:
            self._open[-1].quoted.append(name)

    def open(self, name: str, tag: str) -> None:
        """Process the opening tag of the element `name`. `tag` is the text of the opening tag."""
        self._wrongly_closed = None
        if len(self._open) >= MAX_DEPTH:
            self.lost = self.lost or tag
            return
        element = self._open[-1]
        if not self.is_in_text:
            self._drop_text(element, before=name)
            element = self._open[-1]
        if self.is_in_text:
            self._leave_for_sibling(element, name)
            if self._open[-1] is element and not self._become_container(element):
                self.quote(name, tag)
                return
        elif element.may_be_over and not element.schema.lists(name):
            self._close_down_to(self._level_for(name, may_guess=False))
        self._begin(name)

    def close(self, name: str, tag: str) -> None:
        """Process the closing tag of the element `name`. `tag` is the text of the closing tag.

        A closing tag with a wrong name also ends an element with text. The correct closing tag may
        follow the wrong tag. The closing tag of an outer element also closes all inner elements.
        Closing tags of all other elements that are not open are dropped.
        """
        wrongly_closed, self._wrongly_closed = self._wrongly_closed, None
        element = self._open[-1]
        if self._lacks_opener(element, name):
            self._add_unopened(element, name)
        elif element.quoted and (name in element.quoted or not self.has_open(name)):
            while name in element.quoted and element.quoted.pop() != name:
                pass
            self.add_text(tag)
        elif name == wrongly_closed:
            pass
        elif self.has_open(name) and name:
            while self._close() != name:
                pass
        elif self.is_in_text:
            self._wrongly_closed = self._close()
        else:
            element.may_be_over = True

    def end(self) -> bool:
        """Close the call and all open elements. Return False if an argument is malformed."""
        self._close_down_to(0)
        arguments, text = self._open[0], self.stray
        self._drop_text(arguments)
        if text.strip() and not self._calls.is_announced and not arguments.values:
            self.lost = text
        if self.lost:
            return False
        self._settle(arguments)
        for name, json in group_members(arguments.values):
            self._calls.member(name, json)
        self._calls.end_call()
        return True

    def _drop_text(self, element: _Element, *, before: str | None = None) -> None:
        """Drop the text of a container if the text contains no arguments.

        Text that is only a marker may be the rest of an opening tag. If the element `before`
        follows, and exactly one listed member can contain this element, open this member.
        """
        text, element.text = "".join(element.text), []
        is_marked, is_blank = element.is_marked, element.is_blank
        element.is_marked, element.is_blank = False, True
        if is_blank:
            return
        value = text.lstrip().removeprefix(self._marker) if is_marked else text
        if is_marked and not value.strip():
            schema = element.schema
            if before is None or schema.lists(before) or not schema.names:
                return
            outer = self._find_holders(element, before)
            if len(outer) == 1:
                self._begin(outer[0])
                self._become_container(self._open[-1])
            else:
                self.lost = self.lost or text
            return
        members = None if element.shape is _Shape.ARRAY else read_members(value, element.schema)
        if members is not None and not element.names.intersection(members):
            element.names.update(members)
            element.values += [WaitingMember(key, json, json) for key, json in members.items()]
        elif is_marked or may_hold_argument(text, element.schema):
            self.lost = self.lost or text

    def _find_holders(self, element: _Element, name: str) -> list[str]:
        """Return the listed members that have not begun and can contain an element `name`."""
        schema, free = element.schema, element.schema.names - element.names
        if name == ITEM:
            return [member for member in free if "array" in schema.member(member).types]
        return [member for member in free if schema.member(member).lists(name)]

    def _lacks_opener(self, element: _Element, name: str) -> bool:
        """Return whether the closing tag `name` belongs to an element without an opening tag."""
        if not name or element.is_blank or self.has_open(name) or element.quoted:
            return False
        if not self.is_in_text:
            may_have = element.schema.lists(name) or not element.schema.names
            return element.is_marked or (may_have and name not in element.names)
        types = element.schema.types
        can_hold = not types or bool(types & CONTAINERS and "string" not in types)
        return can_hold and (element.is_marked or element.schema.lists(name))

    def _add_unopened(self, element: _Element, name: str) -> None:
        """Make the text of the container `element` its member `name`, which has no opening tag."""
        text, element.text = "".join(element.text), []
        is_marked, element.is_marked = element.is_marked, False
        element.is_blank = True
        if self.is_in_text:
            self._become_container(element)
        self._begin(name)
        text = text.lstrip().removeprefix(self._marker) if is_marked else text.strip()
        left = (f"<{name}>", f"{name}>", f"<{name} ", f"<{name}")  # forms of a broken opening tag
        self.add_text(text.removeprefix(next(filter(text.startswith, left), "")))
        self._close()

    def _leave_for_sibling(self, element: _Element, name: str) -> None:
        """Close the open text if the opening tag `name` shows that the text lacks a closing tag."""
        if element.quoted or element.schema.lists(name):
            return
        may_have_children = not element.schema.types or bool(element.schema.types & CONTAINERS)
        if element.is_blank and may_have_children:
            return
        self._close_down_to(self._level_for(name, may_guess=True))

    def _level_for(self, name: str, *, may_guess: bool) -> int | None:
        """Return the level of the innermost outer container in which `name` may begin, or None.

        With `may_guess`, the next outer container is allowed even if its schema lists no members.
        """
        last = len(self._open) - 1
        for level in range(last - 1, -1, -1):
            container = self._open[level]
            if container.shape is _Shape.ARRAY or (
                container.shape is _Shape.TREE and self._open[level + 1].name == ITEM
            ):
                is_place = name == ITEM
            elif container.schema.names:
                is_place = container.schema.lists(name) and name not in container.names
            else:
                is_place = may_guess and level == last - 1 and name not in container.names
            if is_place:
                return level
        return None

    def _become_container(self, element: _Element) -> bool:
        """Convert the open text to a container. Return False if the element must be a string."""
        types = element.schema.types
        if element.shape is _STRING or not (
            element.is_blank or (types & CONTAINERS and "string" not in types)
        ):
            return False
        if "object" in types and "array" not in types:
            element.shape = _Shape.OBJECT
        elif "array" in types and "object" not in types:
            element.shape = _Shape.ARRAY
            if element.resumed is not None:
                element.is_written = True
                element.num_children = element.resumed.num_children
                element.mark = element.resumed.mark
        else:
            element.shape = _Shape.TREE
            element.is_collected = True
        if not element.is_blank:
            self._drop_text(element)
        element.text = []
        return True

    def _begin(self, name: str) -> None:
        """Open the element `name` in the innermost container."""
        container = self._open[-1]
        if container.is_implied and (name == ITEM or name in container.names):
            self._close()
            container = self._open[-1]
        container.may_be_over = False
        if container.shape is _Shape.ARRAY:
            schema = container.schema.item(container.num_children)
            # If the model left out the item tag, a member of the item's object begins the item.
            if name != ITEM and schema.lists(name):
                self._push(ITEM, schema, shape=_Shape.OBJECT).is_implied = True
                self._begin(name)
                return
        elif container.shape is _Shape.TREE and name == ITEM:
            schema = container.schema.item(container.num_children)
        else:
            schema = container.schema.member(name)
        element = self._push(name, schema)
        ended = container.ended
        if ended is not None and ended.name == name:
            element.resumed, container.ended = ended, None
        else:
            self._settle(container)
        container.names.add(name)

    def _push(self, name: str, schema: ValueSchema, *, shape: _Shape = _UNDECIDED) -> _Element:
        container = self._open[-1]
        may_repeat = container.shape is _Shape.OBJECT and len(self._open) > 1 and not schema.types
        if name in container.arrays:  # a later element adds items, so the array is written later
            items = container.arrays.pop(name)
            container.values.append(WaitingMember(name, f"[{items}]", items))
            container.waiting.add(name)
        waits = container.is_collected or may_repeat or name in container.waiting
        key = None if container.shape is _Shape.ARRAY else name
        container.num_children += 1
        self._open.append(_Element(name, key, schema, waits=waits, is_collected=waits, shape=shape))
        return self._open[-1]

    def _close_down_to(self, level: int | None) -> None:
        """Close every element inside the element at `level`. If `level` is None, close nothing."""
        while level is not None and len(self._open) > level + 1:
            self._close()

    def has_open(self, name: str) -> bool:
        return any(element.name == name for element in self._open[1:])

    def _begin_string(self, element: _Element) -> None:
        """Begin to write the open text as a string if the type of the text is decided."""
        types = element.schema.types
        if element.is_collected or not types <= TEXT_TYPES:
            return
        if element.is_marked and not types:
            return  # the text may be a member without an opening tag
        if element.num_chars <= _MAX_UNDECIDED_CHARS and (
            element.is_blank or _may_be_word("".join(element.text), types)
        ):
            return
        self._write_brackets()
        self._calls.open_string(element.key)
        self._calls.string_text("".join(element.text))
        element.text = []
        element.shape = _STRING

    def _close(self) -> str:
        """Close the innermost element, write or store its value, and return its name."""
        element = self._open[-1]
        if element.shape is _STRING:
            self._calls.close_string()
            self._open.pop()
        elif element.shape in (_Shape.OBJECT, _Shape.ARRAY) and not element.is_collected:
            self._settle(element)
            self._drop_text(element)
            self._write_brackets()
            for name, json in group_members(element.values):
                self._calls.member(name, json)
            self._open.pop()
            if element.shape is _Shape.ARRAY and element.key is not None:
                self._open[-1].ended = element
            else:
                self._calls.close_container()
        elif element.resumed is not None:
            self._open.pop()
            self._continue(element.resumed, element)
        else:
            if element.shape is _UNDECIDED:
                value = self._read_text(element)
            else:
                self._drop_text(element)
                value = _join_container(element)
            self._open.pop()
            may_repeat = element.key is not None and "array" in element.schema.types
            if element.waits or may_repeat:
                self._open[-1].values.append(value)
                self._open[-1].waiting.add(value.name)
            else:
                self._write_brackets()
                self._calls.member(element.key, value.json)
        return element.name

    def _read_text(self, element: _Element) -> WaitingMember:
        """Return the value of an element without children. The value may be items of an array."""
        text, schema = "".join(element.text), element.schema
        if element.is_marked and schema.types and "string" not in schema.types:
            text = text.lstrip().removeprefix(self._marker)
        if schema.types and "string" not in schema.types:  # drop a closing tag that has no marker
            text = text.removesuffix(f"</{element.name}>")
        value = _convert_text(text, schema)
        if "array" not in schema.types:
            return WaitingMember(element.name, value, value)
        items = value[1:-1] if value.startswith("[") else _convert_text(text, schema.item(0))
        return WaitingMember(element.name, value, items)

    def _continue(self, array: _Element, element: _Element) -> None:
        """Add the text of `element` as items to `array`, which is the previous element."""
        self._open[-1].ended = array
        if element.is_blank:
            return
        items = self._read_text(element).json_in_list
        if items:
            self._calls.member(None, items)

    def _settle(self, container: _Element) -> None:
        """Write the closing bracket of the array that ended last in `container`."""
        array, container.ended = container.ended, None
        if array is not None:
            container.arrays[array.name] = self._calls.text_since(array.mark)
            self._calls.close_container()

    def _write_brackets(self) -> None:
        """Write the missing opening brackets of all open containers, before a value is written."""
        if self._open[-1].is_written:
            return
        for element in self._open:
            if not element.is_written and element.shape in (_Shape.OBJECT, _Shape.ARRAY):
                self._calls.open_container(element.key, is_array=element.shape is _Shape.ARRAY)
                element.mark = self._calls.mark
                element.is_written = True


def _may_be_word(text: str, types: frozenset[str]) -> bool:
    """Return whether `text` may begin a bare word such as null, which is no string."""
    if not types:
        return any(word.startswith(text.strip()) for word in _WORDS)
    return "null" in types and "null".startswith(text)


def _convert_text(text: str, schema: ValueSchema) -> str:
    types = schema.types
    if not types:
        return text.strip() if text.strip() in _WORDS else json_string(text)
    if text.strip() or "string" in types:
        return read_value(text, schema)
    if types & CONTAINERS:
        return "{}" if "object" in types else "[]"
    return "null" if "null" in types else json_string(text)


def _join_container(element: _Element) -> WaitingMember:
    """Return the JSON of a container that is written as a whole."""
    values = element.values
    is_array = element.shape is _Shape.ARRAY or (
        element.shape is _Shape.TREE and all(value.name == ITEM for value in values)
    )
    if not is_array:
        written = write_object(group_members(values))
        return WaitingMember(element.name, written, written)
    items = ", ".join(value.json for value in values)
    is_declared = "array" in element.schema.types
    return WaitingMember(element.name, f"[{items}]", items if is_declared else f"[{items}]")
