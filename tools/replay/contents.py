"""Write prose and files of a coding agent, with texts that may confuse an API or a parser."""

import random
from collections.abc import Sequence

from negamax.bench.agent_sessions import NOUNS, VERBS

_LINES = (
    'def {verb}_{noun}({other}: "{Noun}", *, limit: int = {number}) -> None:  # it\'s "quoted", '
    'isn\'t it?',
    '    """{Verb} the {noun} of `{other}`."""',
    "    return [item for item in {other}.{noun}s if 0 < item.size <= {number} and item is not "
    "None]",
    "<div class=\"{noun}\" data-{other}='{{\"k\": [1, null, true]}}'>&amp;&lt;b&gt; {Verb} "
    "&copy;</div><!-- {other} -->",
    '<?xml version="1.0"?><a:root xmlns:a="urn:{noun}"><a:{other}/><![CDATA[ <{verb}> ]]></a:root>',
    "naïve Größe – “{noun}” … 日本語の{other} العربية हिन्दी 👩‍🚀 🇩🇪 🏳️‍🌈",
    "{verb} e\u0301 zero\u200bwidth line\u2028separator next\u0085line \ufeff",
    "\t\tif ({noun}\t&& !{other}) {{\t/* {verb}\\t */\r\t}}",
    r'"\u00e9\n\t\\\" \x00 \\" + \'{noun}\' + "C:\\{other}\\new\\table"',
    "\x1b[31mFAILED\x1b[0m {noun}.py::test_{verb} - \x07 {number} passed\x0b\x0c",
    r'^(?:[^"\\{other}]|\\.)*$ (?P<{noun}>[a-z]{{{number}}}) \d+\s*\Z',
    "{{{{ 7 * 7 }}}} {{% raw %}} ${{{noun}}} `{verb}` $(id) %s %({other})d \\${{x}}",
    '{{"{noun}": {{"a": [1, 2.50, -0.0, 1e-7, null, {{}}, []]}}, "{other}": "null"}}',
    "- [x] **{Verb}** the _{noun}_ | `{other}` | <kbd>Ctrl</kbd> | \\| ~~{number}~~ ```",
    "data: {{\"{noun}\": 1}}\n\ndata: [DONE]\n\nevent: {verb}",
    "None null true false NaN Infinity undefined nil 007 1_000 0x1F",
    "    ",
    "",
)  # fmt: skip
_ENDS = ("", "\n", "\n", "\n", "\n\n\n", " \n", "\t", "  ", "\r\n")


class Contents:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def name(self) -> str:
        return f"{self._rng.choice(VERBS)}_{self._rng.choice(NOUNS)}"

    def path(self) -> str:
        rng = self._rng
        folder = rng.choice(("src", "src/ui", "test data", "docs/größe", "lib/it's", "C:\\work"))
        return f"/{folder}/{self.name()}.{rng.choice(('py', 'ts', 'html', 'md', 'xml', 'json'))}"

    def sentence(self) -> str:
        rng = self._rng
        return (
            f"I {rng.choice(VERBS)} the {rng.choice(NOUNS)} of the {rng.choice(NOUNS)} first, "
            f"because {self.path()} does not {rng.choice(VERBS)} "
            f"it{rng.choice(('', ' – yet', ' 🙂', ' (see #42)'))}."
        )

    def prose(self, num_chars: int, *, among: Sequence[str] = ()) -> str:
        """Write paragraphs that quote the pieces in `among`."""
        rng = self._rng
        sentences = [self.sentence()]
        while sum(map(len, sentences)) < num_chars:
            sentences.append(self.sentence())
        for piece in among:
            place = rng.randrange(len(sentences))
            sentences[place] += f" The text `{piece}` is not one of ours."
        joints = rng.choices((" ", "\n", "\n\n", "\n- "), (6, 2, 1, 1), k=len(sentences) - 1)
        return "".join(a + b for a, b in zip(sentences, [*joints, ""], strict=True))

    def file(self, num_chars: int, *, among: Sequence[str] = ()) -> str:
        """Write about `num_chars` characters of a file that has the lines in `among`."""
        rng = self._rng
        lines: list[str] = []
        size = 0
        while size < num_chars:
            form, verb, noun = rng.choice(_LINES), rng.choice(VERBS), rng.choice(NOUNS)
            words = {"verb": verb, "noun": noun, "Verb": verb.title(), "Noun": noun.title()}
            other = rng.choice(NOUNS)
            line = form.format(**words, other=other, number=rng.randint(1, 512))
            lines.append(line)
            size += len(line) + 1
        for piece in among:
            place = rng.randrange(len(lines) + 1)
            lines.insert(place, f"{rng.choice(VERBS)}: {piece} :{rng.choice(NOUNS)}")
        return rng.choices(("\n", "\r\n"), weights=(5, 1))[0].join(lines) + rng.choice(_ENDS)
