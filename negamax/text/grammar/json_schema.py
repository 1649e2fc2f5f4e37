"""Convert JSON schemas to shapes (`text.grammar.shapes`).

A shape describes values of one JSON type, and merges all keywords that limit these values. The
conversion resolves references, allOf, anyOf and oneOf, so the writers of grammars (`json_rules`,
`tool_calls`) handle shapes only. Keywords that a grammar cannot enforce are refused in strict
schemas and ignored in other schemas.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, NoReturn

from negamax.base.errors import InvalidRequestError
from negamax.config.grammar import refuse_grammar
from negamax.text.grammar.budget import Budget
from negamax.text.grammar.languages import MAX_STATES, Language, Languages
from negamax.text.grammar.patterns import read_number_bounds, read_pattern, write_multiples
from negamax.text.grammar.schema_keywords import (
    FORMATS,
    MAX_COUNT,
    drop_values,
    find_members,
    read_bounds,
    read_items,
    read_limits,
    read_number,
    split_nullable,
)
from negamax.text.grammar.shapes import (
    NEVER,
    ArrayShape,
    LiteralShape,
    Nodes,
    NumberShape,
    ObjectShape,
    Shape,
    TextShape,
)
from negamax.text.schema_walk import (
    TYPES,
    get_list,
    get_map,
    infer_type,
    is_equal,
    resolve_pointer,
    type_name,
)

# Keywords that a grammar cannot enforce, because grammars cannot remember or exclude values.
NOT_ENFORCED = (
    "not", "contains", "uniqueItems", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip

MAX_LEVELS = 100  # maximum levels of nested references and alternatives
MAX_DIGITS = 40  # maximum digits of a bound such as `minimum`
MAX_PATTERNS = 4  # maximum number of patterns for member names of one object
MAX_EXCLUDED = 400  # maximum total length of the member names that an automaton excludes
_MAX_COMPARED_LEVELS = 3  # maximum nesting levels of compared alternatives


class Schemas:
    """The schemas of one document. With `infers`, keywords imply a missing `type`."""

    def __init__(
        self, root: Any, *, strict: bool, infers: bool | None = None, budget: Budget | None = None
    ) -> None:
        self.root, self.strict, self.budget = root, strict, budget or Budget()
        self._infers = not strict if infers is None else infers
        self.languages = Languages()
        self._shapes: dict[frozenset[int], list[Shape]] = {}
        self._patterns: dict[str, Language | None] = {}
        self._made: dict[tuple[object, ...], Any] = {}  # (kind, schema ids) -> derived schema
        self._kept: list[Nodes] = []  # keeps schemas alive, as keys of `_made` contain their `id`
        self._choices: list[list[list[Nodes]]] = []  # branches of each oneOf that will be compared
        self._compared: set[int] = set()
        self._level = 0

    def shapes(self, nodes: Nodes) -> list[Shape]:
        """Return the shapes of the values that match all `nodes`, or [] if no value matches.

        Raises `InvalidRequestError` if the schemas exceed the budget, or if a strict schema has a
        reference without a target or a keyword that cannot be enforced.
        """
        key = frozenset(map(id, nodes))
        found = self._shapes.get(key)
        if found is None:
            self._kept.append(nodes)
            branches = _cross([self._expand(node, ()) for node in nodes], self.budget)
            found = self._shapes[key] = [
                shape for branch in branches for shape in self._read_branch(branch)
            ]
            if self._level == 0:
                self._compare_choices()
        return found

    def admits(self, nodes: Nodes, value: Any) -> bool:
        return any(self._fits(shape, value) for shape in self.shapes(nodes))

    def member(self, shape: ObjectShape, name: str) -> Nodes:
        if name in shape.listed:
            return shape.listed[name]
        for language, nodes in shape.others:
            if language is None or self.languages.contains(language, name):
                return nodes
        return NEVER

    # --- alternatives ---

    def _expand(self, node: Any, path: tuple[int, ...]) -> list[Nodes]:
        """Return the alternatives of `node`. All schemas of an alternative limit the same value."""
        if not isinstance(node, Mapping):
            if self.strict and not isinstance(node, bool):
                refuse_grammar(
                    f"the JSON schema has a {type(node).__name__} instead of a subschema"
                )
            return [] if node is False else [()]
        if id(node) in path:
            if self.strict:
                refuse_grammar(
                    "the JSON schema has a reference that only leads to itself; make such "
                    "references optional or nullable, so that an output can end"
                )
            return []
        if len(path) > MAX_LEVELS:
            refuse_grammar(
                f"the JSON schema nests more than {MAX_LEVELS} references and alternatives; make "
                f"the schema simpler"
            )
        self.budget.spend()
        path = (*path, id(node))
        if node.get("nullable") is True:
            parts = self._made_of("nullable", node, partial(split_nullable, node))
            return [branch for part in parts for branch in self._expand(part, path)]
        self._check_keywords(node, is_root=node is self.root)
        groups = [[(node,)]]
        reference = node.get("$ref")
        if isinstance(reference, str):
            self.budget.spend(len(reference) // 16)
            groups.append(self._expand(self._resolve(reference), path))
        groups += [self._expand(part, path) for part in get_list(node, "allOf")]
        if isinstance(node.get("anyOf"), list):
            found = (self._expand(part, path) for part in node["anyOf"])
            groups.append([branch for branches in found for branch in branches])
        if isinstance(node.get("oneOf"), list):
            exclusive = [self._expand(part, path) for part in node["oneOf"]]
            if self.strict and id(node) not in self._compared:
                self._compared.add(id(node))
                base = _cross(groups, self.budget)
                self._choices.append([_cross([base, group], self.budget) for group in exclusive])
            groups.append([branch for group in exclusive for branch in group])
        branches = _cross(groups, self.budget)
        if "unevaluatedProperties" in node or "unevaluatedItems" in node:
            branches = [self._close(node, branch) for branch in branches]
        return branches

    def _resolve(self, reference: str) -> Any:
        target = resolve_pointer(reference, root=self.root)
        if target is None and self.strict:
            refuse_grammar(
                f"the JSON schema refers to {reference!r}, but has no schema there; send all "
                f"schemas in one document"
            )
        return True if target is None else target

    def _check_keywords(self, node: Mapping[str, Any], *, is_root: bool) -> None:
        """Refuse keywords of a strict schema that a grammar cannot enforce."""
        if not self.strict:
            return
        found = [name for name in NOT_ENFORCED if name in node]
        if node.get("uniqueItems") is False:
            found.remove("uniqueItems")
        if "if" in node:
            found += [name for name in ("then", "else") if name in node]
        if not is_root and isinstance(node.get("$id"), str):
            found.append("$id")
        if found:
            self._refuse_keyword(found[0])

    def _refuse_keyword(self, keyword: str, where: str = "") -> NoReturn:
        refuse_grammar(
            f"the JSON schema uses {keyword!r}{where}, which cannot be enforced; remove the "
            f"keyword, or send strict: false"
        )

    def _close(self, node: Mapping[str, Any], branch: Nodes) -> Nodes:
        """Return `branch` with a schema for the members and items that `branch` does not list."""
        for part in branch:
            for keyword in ("anyOf", "if"):
                if self.strict and keyword in part:
                    self._refuse_keyword(keyword, " beside an unevaluated keyword")

        def make() -> dict[str, Any]:
            made: dict[str, Any] = {}
            if "unevaluatedProperties" in node:
                for keyword in ("properties", "patternProperties"):
                    made[keyword] = {n: True for part in branch for n in get_map(part, keyword)}
                is_open = any("additionalProperties" in part for part in branch)
                made["additionalProperties"] = is_open or node["unevaluatedProperties"]
            if "unevaluatedItems" in node:
                tuples = [read_items(part) for part in branch]
                made["prefixItems"] = [True] * max(len(first) for first, _ in tuples)
                is_open = any(others is not None for _, others in tuples)
                made["items"] = is_open or node["unevaluatedItems"]
            return made

        made = self._made_of("closed", (node, branch), make)
        return (*branch, made)

    def _made_of(self, kind: str, origin: Any, make: Callable[[], Any]) -> Any:
        """Return the schema that `make` derives from `origin`; call `make` only once per origin."""
        parts = origin if isinstance(origin, tuple) else (origin,)
        key = (kind, *(frozenset(map(id, p)) if isinstance(p, tuple) else id(p) for p in parts))
        if key not in self._made:
            self._kept.append(parts)
            self._made[key] = make()
        return self._made[key]

    # --- shapes of one alternative ---

    def _read_branch(self, branch: Nodes) -> Iterator[Shape]:
        types = set(TYPES)
        for node in branch:
            types &= self._read_types(node)
        listed = [node for node in branch if "const" in node or "enum" in node]
        if listed:
            yield from self._read_values(branch, listed, types)
            return
        for name in TYPES:
            if name in types and not (name == "integer" and "number" in types):
                yield from self._read_type(name, branch)

    def _read_types(self, node: Mapping[str, Any]) -> set[str]:
        declared = node.get("type")
        if declared is None and self._infers and not {"const", "enum"} & node.keys():
            declared = infer_type(node)
        if declared is None:
            return set(TYPES)
        names = set(declared if isinstance(declared, list) else [declared])
        if not names <= set(TYPES):
            if self.strict:
                refuse_grammar(f"the JSON schema has the type {declared!r}; allowed: {TYPES}")
            return set(TYPES)
        return names | {"integer"} if "number" in names else names

    def _read_values(
        self, branch: Nodes, listed: list[Any], types: set[str]
    ) -> Iterator[LiteralShape]:
        lists = [
            [node["const"]] if "const" in node else get_list(node, "enum") for node in listed
        ] + [get_list(node, "enum") for node in listed if "const" in node and "enum" in node]
        rest = tuple(self._made_of("others", node, partial(drop_values, node)) for node in branch)
        self.budget.spend(sum(map(len, lists)) // 16)
        has_limits = any(part.keys() - _ANNOTATIONS for part in rest)
        shapes = self.shapes(rest) if has_limits else []
        written: set[str] = set()
        for value in lists[0]:
            text = json.dumps(value)
            fits = not has_limits or any(self._fits(shape, value) for shape in shapes)
            is_typed = type_name(value) in types or (
                "integer" in types and isinstance(value, float) and value.is_integer()
            )
            others = (any(is_equal(value, one) for one in values) for values in lists[1:])
            if fits and is_typed and text not in written and all(others):
                written.add(text)
                yield LiteralShape(value)

    def _read_type(self, name: str, branch: Nodes) -> Iterator[Shape]:
        match name:
            case "null":
                yield LiteralShape(None)
            case "boolean":
                yield from map(LiteralShape, (True, False))
            case "string":
                yield from self._read_text(branch)
            case "array":
                yield from self._read_array(branch)
            case "object":
                yield from self._read_object(branch)
            case _:
                yield from self._read_number(name, branch)

    def _read_text(self, branch: Nodes) -> Iterator[TextShape]:
        least, most = read_limits(branch, "minLength", "maxLength")
        if most is not None and most < least:
            return
        forms = [FORMATS.get(str(node.get("format"))) for node in branch if "type" in node]
        patterns = [*(node.get("pattern") for node in branch), *forms]
        parts = [self._read_pattern(text) for text in patterns if isinstance(text, str)]
        found = self.languages.all_of([part for part in parts if part is not None])
        run = self.languages.repeat(self.languages.any_char, least, most)
        limited = self.languages.all_of([found, self.languages.whole(run)])
        # If an automaton of the pattern and the length limits has too many states, a schema that
        # is not strict ignores the length limits.
        for language in (limited, found) if any(parts) else ():
            is_possible = self._is_possible(language)
            if is_possible is not None:
                yield from [TextShape(language)] if is_possible else []
                return
        yield TextShape(None, least, most)

    def _is_possible(self, language: Language) -> bool | None:
        """Return whether the language has a text, or None if its automaton has too many states."""
        if language.plain is not None:
            return language.ended != self.languages.none
        states = self.languages.find_automaton(language)
        if states is None:
            if not self.strict:
                return None
            refuse_grammar(
                f"a pattern and its length limits need more than {MAX_STATES} states; make the "
                f"pattern or the limits simpler"
            )
        self.budget.spend(len(states))
        return bool(states)

    def _read_pattern(self, pattern: str) -> Language | None:
        """Return the language of `pattern`; None if it is unsupported and `strict` is False."""
        if pattern not in self._patterns:
            self.budget.spend(1 + len(pattern) // 16)
            try:
                self._patterns[pattern] = read_pattern(pattern, self.languages)
            except InvalidRequestError:
                if self.strict:
                    raise
                self._patterns[pattern] = None
        return self._patterns[pattern]

    def _read_number(self, name: str, branch: Nodes) -> Iterator[NumberShape]:
        bounds = [read_bounds(node) for node in branch]
        low = max((bound for lows, _ in bounds for bound in lows), default=None)
        high = min(
            (bound for _, highs in bounds for bound in highs),
            key=lambda bound: (bound[0], not bound[1]),
            default=None,
        )
        if any(bound is not None and len(f"{bound[0]:f}") > MAX_DIGITS for bound in (low, high)):
            if self.strict:
                self._refuse_keyword("minimum", f" or a maximum of over {MAX_DIGITS} digits")
            low = high = None
        forms = []
        for step in {read_number(node.get("multipleOf")) for node in branch} - {None}:
            form = None if step is None else write_multiples(step)
            if form is None and self.strict:
                self._refuse_keyword("multipleOf", f" of {step}")
            forms += [form] if form is not None else []
        if not forms and low is None and high is None:
            yield NumberShape(name, None)
            return
        language = read_number_bounds(
            self.languages, is_integer=name == "integer", low=low, high=high, steps=forms
        )
        if self._is_possible(language) is not False:
            yield NumberShape(name, language)

    def _read_array(self, branch: Nodes) -> Iterator[ArrayShape]:
        least, most = read_limits(branch, "minItems", "maxItems")
        tuples = [read_items(node) for node in branch]
        length = max((len(first) for first, _ in tuples), default=0)
        self.budget.spend(length * len(tuples))
        others = _conjoin(others for _, others in tuples)
        first = [
            _conjoin(first[place] if place < len(first) else others for first, others in tuples)
            for place in range(length)
        ]
        if most is None or least <= most:
            yield ArrayShape(tuple(first), others, least, most)

    def _read_object(self, branch: Nodes) -> Iterator[ObjectShape]:
        least, most = read_limits(branch, "minProperties", "maxProperties")
        required = dict.fromkeys(
            name for node in branch for name in get_list(node, "required") if isinstance(name, str)
        )
        names = dict.fromkeys(name for node in branch for name in get_map(node, "properties"))
        names |= required
        self.budget.spend(len(names) * len(branch))
        patterns = {p: None for node in branch for p in get_map(node, "patternProperties")}
        readable = {p: found for p in patterns if (found := self._read_pattern(p)) is not None}
        if len(readable) > MAX_PATTERNS:
            if self.strict:
                self._refuse_keyword("patternProperties", f" with over {MAX_PATTERNS} patterns")
            readable = {}
        allowed = [node["propertyNames"] for node in branch if "propertyNames" in node]

        def choose(name: str | None, matched: Iterable[str]) -> Nodes:
            """Return the schemas of member `name`. `matched` are patterns that match `name`."""
            return _conjoin(find_members(node, name, matched) for node in branch)

        listed: dict[str, Nodes] = {}
        for name in names:
            matched = [p for p, lang in readable.items() if self.languages.contains(lang, name)]
            if not allowed or self.admits(tuple(allowed), name):
                listed[name] = choose(name, matched)
        if any(name not in listed for name in required):
            return
        if most is not None and most < max(least, len(required)):
            return
        others = self._read_others(readable, tuple(allowed), listed, choose)
        keywords = {keyword for node in branch for keyword in node}
        is_closed = not keywords.isdisjoint(("properties", "required")) and keywords.isdisjoint(
            ("additionalProperties", "patternProperties", "unevaluatedProperties")
        )
        has_patterns = bool(readable or allowed)
        yield ObjectShape(listed, frozenset(required), others, least, most, is_closed, has_patterns)

    def _read_others(
        self,
        patterns: dict[str, Language],
        allowed: Nodes,
        listed: dict[str, Nodes],
        choose: Callable[[str | None, Iterable[str]], Nodes],
    ) -> list[tuple[Language | None, Nodes]]:
        """Return pairs (language of unlisted names, schemas of the members with these names)."""
        languages = self.languages
        base: list[Language] = []
        if allowed:
            texts = [self._language_of(shape) for shape in self.shapes(allowed)]
            base.append(languages.any_of([text for text in texts if text is not None]))
        found: list[tuple[Language | None, Nodes]] = []
        for is_matched in itertools.product((True, False), repeat=len(patterns)):
            nodes = choose(None, [p for p, has in zip(patterns, is_matched, strict=True) if has])
            if False in nodes:
                continue
            parts = [
                language if has else languages.invert(language)
                for language, has in zip(patterns.values(), is_matched, strict=True)
            ]
            parts += base
            if not parts:
                found.append((self._exclude(listed), nodes))
                continue
            if listed:
                parts.append(languages.invert(languages.any_of(list(map(self._word, listed)))))
            language = languages.all_of(parts)
            if self._is_possible(language):
                found.append((language, nodes))
        return found

    def _word(self, text: str) -> Language:
        return self.languages.whole(self.languages.text(text))

    def _exclude(self, names: Iterable[str]) -> Language | None:
        """Return all texts except `names`. Texts that begin like a long name are excluded too."""
        languages, texts = self.languages, list(names)
        if not texts:
            return None
        length = max(map(len, texts))
        while length > 1 and length * len({text[:length] for text in texts}) > MAX_EXCLUDED:
            length = length * 2 // 3
        anything = languages.repeat(languages.any_char)
        cut = {text[:length]: len(text) > length for text in sorted(texts)}
        excluded = languages.either(
            languages.join([languages.text(text), anything if is_cut else languages.empty])
            for text, is_cut in cut.items()
        )
        return languages.invert(languages.whole(excluded))

    def _language_of(self, shape: Shape) -> Language | None:
        languages = self.languages
        match shape:
            case LiteralShape(str() as value):
                return self._word(value)
            case TextShape(None, least, most):
                return languages.whole(languages.repeat(languages.any_char, least, most))
            case TextShape(language) | NumberShape(_, language):
                return language
        return None

    # --- comparisons ---

    def _fits(self, shape: Shape, value: Any) -> bool:
        name = type_name(value)
        match shape:
            case LiteralShape(literal):
                return is_equal(literal, value)
            case TextShape() if name == "string":
                language = self._language_of(shape)
                return language is None or self.languages.contains(language, value)
            case NumberShape() if name in ("integer", "number"):
                return self._fits_number(shape, value)
            case ArrayShape() if name == "array":
                most = MAX_COUNT if shape.most is None else shape.most
                places = itertools.chain(shape.first, itertools.repeat(shape.others))
                return shape.least <= len(value) <= most and all(map(self.admits, places, value))
            case ObjectShape() if name == "object":
                most = MAX_COUNT if shape.most is None else shape.most
                return (
                    shape.least <= len(value) <= most
                    and shape.required <= value.keys()
                    and all(self.admits(self.member(shape, key), value[key]) for key in value)
                )
        return False

    def _fits_number(self, shape: NumberShape, value: float) -> bool:
        number = Decimal(repr(value))
        if shape.type == "integer" and number != number.to_integral_value():
            return False
        whole = number == number.to_integral_value()
        text = f"{number.quantize(Decimal(1)) if whole and abs(number) < 10**25 else number:f}"
        return shape.language is None or self.languages.contains(shape.language, text)

    def _compare_choices(self) -> None:
        """Refuse oneOf if a value may match two of its branches."""
        self._level += 1
        while self._choices:
            groups = self._choices.pop()
            self.budget.spend(len(groups) ** 2 // 16)
            shapes = [[s for part in group for s in self._read_branch(part)] for group in groups]
            for one, other in itertools.combinations(shapes, 2):
                if not all(self._are_apart(a, b) for a in one for b in other):
                    self._refuse_keyword("oneOf", " with schemas that overlap (anyOf may overlap)")
        self._level -= 1

    def _are_apart(self, one: Shape, other: Shape) -> bool:
        """Return True if no value can have both shapes, and False if this is not certain."""
        kinds = {one.type, other.type}
        if len(kinds) > 1 and kinds != {"integer", "number"}:
            return True
        if isinstance(one, LiteralShape):
            return not self._fits(other, one.value)
        if isinstance(other, LiteralShape):
            return not self._fits(one, other.value)
        match one, other:
            case (TextShape(), TextShape()) | (NumberShape(), NumberShape()):
                parts = [self._language_of(shape) for shape in (one, other)]
                known = [part for part in parts if part is not None]
                return len(known) == 2 and self._is_possible(self.languages.all_of(known)) is False
            case ObjectShape(), ObjectShape():
                return any(
                    self._are_schemas_apart(self.member(one, name), self.member(other, name))
                    for name in one.required | other.required
                )
        return False

    def _are_schemas_apart(self, one: Nodes, other: Nodes) -> bool:
        if self._level > _MAX_COMPARED_LEVELS:
            return False
        self._level += 1
        pairs = itertools.product(self.shapes(one), self.shapes(other))
        found = all(self._are_apart(a, b) for a, b in pairs)
        self._level -= 1
        return found


_ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment", "$schema", "$id", "$defs", "definitions", "$anchor",
}  # fmt: skip


def _cross(groups: list[list[Nodes]], budget: Budget) -> list[Nodes]:
    """Choose one branch per group in every possible way, and join the schemas of each choice."""
    found: list[Nodes] = [()]
    for group in groups:
        if len(group) > 1 or len(found) > 1:
            budget.spend(len(group) * len(found))
        joined: dict[frozenset[int], Nodes] = {}
        for one, other in itertools.product(found, group):
            nodes = tuple({id(node): node for node in (*one, *other)}.values())
            joined.setdefault(frozenset(map(id, nodes)), nodes)
        found = list(joined.values())
    return found


def _conjoin(schemas: Iterable[Any]) -> Nodes:
    """Flatten schemas and tuples of schemas to one tuple, without None and duplicates."""
    found: dict[int, Any] = {}
    for schema in schemas:
        for part in schema if isinstance(schema, tuple) else (schema,):
            if part is False:
                return NEVER
            if part is not None and part is not True and part != {}:
                found[id(part)] = part
    return tuple(found.values())
