import time

import pytest
from parser_support import MARKER, MINIMAX_M2, MINIMAX_M3, TOOLS, new_parser, text_chunks

from negamax.text.parser.output_format import OutputFormat
from tests.speed import is_linear, slowness

NUM_CHARS = 100_000
M2 = 'x\n</think>\n\n<minimax:tool_call>\n<invoke name="write_file">\n'
M2_CONTENT = f'{M2}<parameter name="content">'
M2_END = "</parameter>\n</invoke>\n</minimax:tool_call>"
M3 = f'<mm:think>x</mm:think>{MARKER}<tool_call>\n{MARKER}<invoke name="write_file">'
M3_EVENT = M3.replace("write_file", "create_event")
M2_CALL = '<invoke name="write_file"><parameter name="mode">5</parameter></invoke>\n'
M3_CALL = f'{MARKER}<invoke name="ping">{MARKER}</invoke>\n'
M3_TAGS = f"{MARKER}<tags>{MARKER}<item>a{MARKER}</tags>"
M3_CONTENT = f"{M3}{MARKER}<content>"
# head, repeated part (with its number), and tail of each text
TEXTS: dict[str, tuple[OutputFormat, str, str, str]] = {
    "m2 reasoning": (MINIMAX_M2, "", "a < b, ] and </thin or <minimax: ", ""),
    "m2 content": (MINIMAX_M2, "x</think>", "words < and <b> or [x] ", ""),
    "m2 string": (MINIMAX_M2, M2_CONTENT, "if a < b: return '<tag>' \n", M2_END),
    "m2 angles": (MINIMAX_M2, M2_CONTENT, "<", ""),
    "m2 closers": (MINIMAX_M2, M2_CONTENT, "</parameter>", ""),
    "m2 closer and space": (MINIMAX_M2, f"{M2_CONTENT}</parameter>", " ", "x"),
    "m2 space": (MINIMAX_M2, "", " ", "x"),
    "m2 quoted openers": (MINIMAX_M2, "", "x<minimax:tool_call>", ""),
    "m2 unclosed tag": (MINIMAX_M2, f"{M2_CONTENT}<parameter ", "a", ""),
    "m2 long tags": (MINIMAX_M2, M2_CONTENT, "<parameter " + "a" * 500, ""),
    "m2 JSON": (MINIMAX_M2, f'{M2}<parameter name="tags">', "[", M2_END),
    "m2 parameters": (MINIMAX_M2, M2, '<parameter name="p@">@</parameter>\n', "</invoke>"),
    "m2 calls": (MINIMAX_M2, M2, M2_CALL, ""),
    "m2 words in an invoke": (MINIMAX_M2, M2, "x", "</invoke>"),
    "m2 elements in an invoke": (MINIMAX_M2, M2, "<a>b</a>", "</invoke>"),
    "m2 JSON in a block": (MINIMAX_M2, "</think>\n\n<minimax:tool_call>", '{"a":', ""),
    "m2 unread calls": (MINIMAX_M2, M2, '{</invoke><invoke name="write_file">x', ""),
    "m2 open quotes": (MINIMAX_M2, M2_CONTENT, '<parameter name="<', ""),
    "m2 closers and words": (MINIMAX_M2, M2_CONTENT, "</parameter>\nname= ", M2_END),
    "m2 closers of nothing": (MINIMAX_M2, M2, "a</parameter>", "</invoke>"),
    "m2 repeated items": (MINIMAX_M2, M2, '<parameter name="tags">a</parameter>', "</invoke>"),
    "m2 fences": (MINIMAX_M2, "</think>", f"```\n{M2_CALL}```\n", ""),
    "m2 quoted calls in a line": (MINIMAX_M2, "</think>```", "<minimax:tool_call>x", ""),
    "m3 reasoning": (MINIMAX_M3, "<mm:think>", "a < b ] and ]<] or <mm:thin ", ""),
    "m3 content": (MINIMAX_M3, "", "words ]< and [x] or <tool ", ""),
    "m3 string": (MINIMAX_M3, M3_CONTENT, "if a[i] < b: return '<tag>' \n", f"{MARKER}</content>"),
    "m3 brackets": (MINIMAX_M3, M3_CONTENT, "]", ""),
    "m3 markers": (MINIMAX_M3, M3_CONTENT, MARKER, ""),
    "m3 quoted elements": (MINIMAX_M3, f"{M3_CONTENT}x", f"{MARKER}<b>{MARKER}</b>", ""),
    "m3 quoted openers": (MINIMAX_M3, f"{M3_CONTENT}x", f"{MARKER}<b>", f"{MARKER}</c>" * 1000),
    "m3 unclosed tag": (MINIMAX_M3, f"{M3_CONTENT}{MARKER}<", "a", ""),
    "m3 spliced tags": (MINIMAX_M3, f"{M3_CONTENT}x", f"{MARKER}<invoke x{MARKER}<yy", ""),
    "m3 unfit closers": (MINIMAX_M3, M3, f"{MARKER}<path>a{MARKER}</q>", ""),
    "m3 arguments": (MINIMAX_M3, M3, f"{MARKER}<p@>v@{MARKER}</p@>", ""),
    "m3 items": (MINIMAX_M3, f"{M3}{MARKER}<tags>", f"{MARKER}<item>ab{MARKER}</item>", ""),
    "m3 untyped": (MINIMAX_M3, f"{M3_EVENT}{MARKER}<any>", f"{MARKER}<item>ab{MARKER}</item>", ""),
    "m3 members": (MINIMAX_M3, f"{M3_EVENT}{MARKER}<meta>", f"{MARKER}<a>v{MARKER}</a>", ""),
    "m3 marked words": (MINIMAX_M3, f"{M3_EVENT}{MARKER}<any>{MARKER}", "x", ""),
    "m3 unread calls": (MINIMAX_M3, M3, f'{{{MARKER}</invoke>{MARKER}<invoke name="ping">x', ""),
    "m3 elided openers": (MINIMAX_M3, M3, f"{MARKER}a{MARKER}</p@>", ""),
    "m3 repeated arrays": (MINIMAX_M3, M3, M3_TAGS, ""),
    "m3 arrays apart": (MINIMAX_M3, M3, f"{M3_TAGS}{MARKER}<mode>5{MARKER}</mode>", ""),
    "m3 other closers": (MINIMAX_M3, "<mm:think>x", "</think> ", ""),
    "m3 deep nesting": (MINIMAX_M3, f"{M3_EVENT}{MARKER}<any>", f"{MARKER}<a>", ""),
    "m3 space": (MINIMAX_M3, f"{M3_EVENT}{MARKER}<any>", " ", ""),
    "m3 calls": (MINIMAX_M3, f"{M3}{MARKER}</invoke>", M3_CALL, ""),
}


def seconds_to_read(name: str, num_chars: int, *, size: int) -> float:
    format, head, part, tail = TEXTS[name]
    parts = (part.replace("@", str(number)) for number in range(num_chars // len(part)))
    text = head + "".join(parts) + tail
    chunks = text_chunks(text[i : i + size] for i in range(0, len(text), size))
    parser = new_parser(format, tools=TOOLS)
    start = time.process_time()
    for chunk in chunks:
        parser.feed(chunk)
    parser.finish()
    return time.process_time() - start


@pytest.mark.parametrize("name", TEXTS)
def test_time_is_linear_in_the_length(name: str) -> None:
    assert is_linear(lambda length: seconds_to_read(name, length, size=4), NUM_CHARS)


@pytest.mark.full
@pytest.mark.parametrize("name", TEXTS)
def test_a_megabyte_takes_a_second_or_two_in_pieces(name: str) -> None:
    assert is_linear(lambda length: seconds_to_read(name, length, size=length), NUM_CHARS)
    assert seconds_to_read(name, 1_000_000, size=1_100_000) < slowness()
    assert seconds_to_read(name, 1_000_000, size=4) < 2 * slowness()  # 250,000 pieces
