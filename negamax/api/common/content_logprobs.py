"""Log-probabilities of the tokens that make up an answer's content."""

import codecs
import re
from collections import deque
from collections.abc import Sequence

from negamax.api.common.blocks import Block, BlockKind
from negamax.api.common.logprobs import convert_chat_logprobs
from negamax.api.schemas.answers import ChatLogprob
from negamax.models.chat_format import ChatFormat
from negamax.scheduler.step import TokenLogprobs
from negamax.text.parser.output_parser import Thinking
from negamax.text.tokenizer import Tokenizer

_COMPACT_CHARS = 65_536  # characters of matched text to keep
_SPACE = re.compile(r"\s*")


class ContentLogprobs:
    """Matches growing text of blocks with text of tokens. Single writer: the request's handler.

    Reasoning and content occur in the generated text in order. Tags, calls and white space between
    them are skipped. A token that two stretches of content share belongs to the first.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_format: ChatFormat, *, as_ids: bool = False
    ) -> None:
        """`as_ids`: as in `convert_chat_logprobs`."""
        self._as_ids = as_ids
        self._closer_id = None
        if chat_format.thinking is not Thinking.RAW:  # no block contains the text of this token
            self._closer_id = chat_format.tag_ids.get(chat_format.output.think_close)
        self._tokenizer = tokenizer
        output = chat_format.output
        tags = sorted({*output.literals, *output.call_closers}, key=len, reverse=True)
        self._tag = re.compile("|".join(map(re.escape, tags)))
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_mid_character = False
        # first character, and the one after the last
        self._tokens: deque[tuple[int, int, TokenLogprobs]] = deque()
        self._new_texts: list[str] = []  # of tokens, to be appended to `_text`
        self._text = ""  # position of `_text` in the whole text
        self._start = 0
        self._at = 0  # end of the last stretch, in `_text`
        self._end = 0  # characters so far
        self._of_block: dict[int, list[ChatLogprob]] = {}  # by the block's index
        self._num_parts: dict[int, int] = {}  # parts of a block that were matched
        self._latest = -1  # index of the block matched last

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        for entry in entries:
            is_closer = entry.token_id == self._closer_id
            raw = b"" if is_closer else self._tokenizer.token_bytes(entry.token_id)
            if self._is_mid_character and raw and not 0x80 <= raw[0] < 0xC0:
                self._end_character()
            first = self._end
            self._append(self._decoder.decode(raw))
            self._is_mid_character = bool(self._decoder.getstate()[0])
            self._tokens.append((first, self._end + self._is_mid_character, entry))

    def take(self, block: Block, text: str) -> list[ChatLogprob]:
        """Return the tokens of the block's next part `text`; none unless it is content."""
        self._num_parts[block.index] = self._num_parts.get(block.index, 0) + 1
        if block.kind is BlockKind.CALL:
            return []
        found = self._tokens_of(text, is_begun=block.index == self._latest)
        self._latest = block.index
        if block.kind is not BlockKind.CONTENT:
            return []
        entries = convert_chat_logprobs(self._tokenizer, found, as_ids=self._as_ids)
        self._of_block.setdefault(block.index, []).extend(entries)
        return entries

    def list_tokens(self, block: Block) -> list[ChatLogprob]:
        """Return the tokens of a block so far. Call it for blocks in order."""
        for part in block.parts[self._num_parts.get(block.index, 0) :]:
            self.take(block, part)
        return self._of_block.get(block.index, [])

    def _append(self, text: str) -> None:
        self._new_texts.append(text)
        self._end += len(text)

    def _end_character(self) -> None:
        self._append(self._decoder.decode(b"", final=True))
        self._is_mid_character = False

    def _tokens_of(self, text: str, *, is_begun: bool) -> list[TokenLogprobs]:
        """Return the tokens of the next stretch of text and drop them and all tokens before."""
        # the answer ended within a character
        if self._is_mid_character and text.endswith("\ufffd"):
            self._end_character()
        self._text += "".join(self._new_texts)
        self._new_texts = []
        place = self._place(text, is_begun=is_begun)
        if place < 0:
            return []
        first, last = self._start + place, self._start + place + len(text)
        found: list[TokenLogprobs] = []
        while self._tokens and self._tokens[0][0] < last:
            begin, end, entry = self._tokens.popleft()
            if end > max(begin, first):
                found.append(entry)
        self._at = place + len(text)
        if self._at > _COMPACT_CHARS:
            self._text, self._start, self._at = self._text[self._at :], last, 0
        return found

    def _place(self, text: str, *, is_begun: bool) -> int:
        """Return where `text` begins: at once, or after white space or a tag; -1: nowhere."""
        if is_begun and self._text.startswith(text, self._at):
            return self._at
        start = self._at
        while True:
            space = _SPACE.match(self._text, start)
            assert space is not None
            place = self._text.find(text, start, space.end() + len(text))
            if place >= 0:
                return place
            tag = self._tag.search(self._text, start)
            if tag is None:
                return self._text.find(text, self._at)
            start = tag.end()
