"""Find the log-probabilities of the tokens in the content of an answer."""

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

_COMPACT_CHARS = 65_536  # If `_text` has more matched characters than this, they are removed.
_SPACE = re.compile(r"\s*")


class ContentLogprobs:
    """Finds a block's tokens by the block's text. Only the request's handler changes this object.

    The generated text contains the blocks of an answer in order. The search skips tags, calls and
    white space between blocks. A token that two blocks of content share belongs to the first block.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_format: ChatFormat, *, as_ids: bool = False
    ) -> None:
        """`as_ids` is passed to `convert_chat_logprobs`."""
        self._as_ids = as_ids
        self._closer_id = None
        if chat_format.thinking is not Thinking.RAW:  # RAW blocks contain the closing think tag.
            self._closer_id = chat_format.tag_ids.get(chat_format.output.think_close)
        self._tokenizer = tokenizer
        output = chat_format.output
        tags = sorted({*output.literals, *output.call_closers}, key=len, reverse=True)
        self._tag = re.compile("|".join(map(re.escape, tags)))
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_mid_character = False
        # Start and end position of each token in the whole text, and the token's logprobs.
        self._tokens: deque[tuple[int, int, TokenLogprobs]] = deque()
        self._new_texts: list[str] = []  # Texts of new tokens that `_text` lacks.
        self._text = ""
        self._start = 0  # Position of `_text` in the whole generated text.
        self._at = 0  # position in `_text` at which the last match ends
        self._end = 0  # Number of characters of the generated text so far.
        self._of_block: dict[int, list[ChatLogprob]] = {}  # index of a content block -> logprobs
        self._num_parts: dict[int, int] = {}  # block index -> number of matched parts of text
        self._latest = -1  # Index of the block that was matched last.

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
        """Return the logprobs of `text`, the next part of `block`; [] if `block` is not content."""
        self._num_parts[block.index] = self._num_parts.get(block.index, 0) + 1
        if block.kind is BlockKind.CALL:
            return []
        found = self._take_tokens(text, is_begun=block.index == self._latest)
        self._latest = block.index
        if block.kind is not BlockKind.CONTENT:
            return []
        entries = convert_chat_logprobs(self._tokenizer, found, as_ids=self._as_ids)
        self._of_block.setdefault(block.index, []).extend(entries)
        return entries

    def list_tokens(self, block: Block) -> list[ChatLogprob]:
        """Return the logprobs of all parts of `block`. Pass the blocks in answer order."""
        for part in block.parts[self._num_parts.get(block.index, 0) :]:
            self.take(block, part)
        return self._of_block.get(block.index, [])

    def _append(self, text: str) -> None:
        self._new_texts.append(text)
        self._end += len(text)

    def _end_character(self) -> None:
        self._append(self._decoder.decode(b"", final=True))
        self._is_mid_character = False

    def _take_tokens(self, text: str, *, is_begun: bool) -> list[TokenLogprobs]:
        """Return the tokens of `text`, and drop all tokens that begin before the end of `text`."""
        # A truncated answer may end within a character, whose bytes then become U+FFFD.
        if self._is_mid_character and text.endswith("\ufffd"):
            self._end_character()
        self._text += "".join(self._new_texts)
        self._new_texts = []
        place = self._find(text, is_begun=is_begun)
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

    def _find(self, text: str, *, is_begun: bool) -> int:
        """Skip white space and tags, and return the position of `text` in `_text`, or -1."""
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
