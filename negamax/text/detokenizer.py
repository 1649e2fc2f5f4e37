"""Convert token ids to text as the ids arrive. The text consists of whole UTF-8 characters."""

import codecs
from collections import deque
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import msgspec

from negamax.text.stop_strings import StopMatcher
from negamax.text.tokenizer import Tokenizer


class TextPiece(msgspec.Struct, frozen=True, gc=False):
    text: str
    token_id: int | None  # id of the token if the piece is the whole text of one token


# Cache: token id -> piece, for tokens whose bytes are whole characters.
_whole_pieces: WeakKeyDictionary[Tokenizer, dict[int, TextPiece]] = WeakKeyDictionary()


class Detokenizer:
    """Converts the token ids of one answer to text, incrementally and in linear time.

    The returned texts together equal `tokenizer.decode` of all ids, truncated at the first stop
    string. A stop string may begin and end within tokens. If two stop strings end at the same
    character, the longer stop string is the match. A stop string that ends before token number
    `min_tokens` is ignored. The detokenizer holds back text that may be the start of a stop string.
    """

    __slots__ = (
        "_decoder", "_held", "_held_chars", "_include_stop", "_mid_character", "_min_tokens",
        "_num_tokens", "_skip_special", "_stop_state", "_stops", "_tokenizer", "_whole",
        "matched_stop",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._whole = _whole_pieces.setdefault(tokenizer, {})
        self._skip_special = skip_special_tokens
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._mid_character = False
        self._stops = StopMatcher(stop) if stop else None
        self._stop_state = 0
        self._held: deque[TextPiece] = deque()
        self._held_chars = 0
        self.matched_stop: str | None = None  # the stop string that ended the text

    def push(self, token_ids: Sequence[int]) -> list[TextPiece]:
        """Add token ids. Return all text, held or new, that cannot be part of a stop string."""
        ready: list[TextPiece] = []
        for token_id in token_ids:
            if self.matched_stop is not None:
                break
            self._num_tokens += 1
            whole = None if self._mid_character else self._whole.get(token_id)
            if whole is not None:
                self._advance(whole, ready)
            elif not (self._skip_special and self._tokenizer.is_special(token_id)):
                for piece in self._decode(token_id):
                    self._advance(piece, ready)
        return ready

    def finish(self) -> list[TextPiece]:
        """End the answer, and return the text held back. An incomplete character becomes U+FFFD."""
        ready: list[TextPiece] = []
        if self._mid_character:
            self._advance(self._unfinished_character(), ready)
        self._release(self._held_chars, ready)
        return ready

    def _decode(self, token_id: int) -> list[TextPiece]:
        raw = self._tokenizer.token_bytes(token_id)
        if not raw:
            return []
        pieces: list[TextPiece] = []
        # This token does not continue the incomplete character, which becomes U+FFFD.
        if self._mid_character and not 0x80 <= raw[0] < 0xC0:
            pieces.append(self._unfinished_character())
        is_whole = not self._mid_character
        text = self._decoder.decode(raw)
        self._mid_character = bool(self._decoder.getstate()[0])
        if text:
            is_whole = is_whole and not self._mid_character
            pieces.append(TextPiece(text, token_id if is_whole else None))
            if is_whole and not self._tokenizer.is_special(token_id):
                self._whole[token_id] = pieces[-1]
        return pieces

    def _unfinished_character(self) -> TextPiece:
        text = self._decoder.decode(b"", final=True)
        self._mid_character = False
        return TextPiece(text, None)

    def _advance(self, piece: TextPiece, ready: list[TextPiece]) -> None:
        """Append `piece`, search for a stop string, and move final text to `ready`."""
        if self._stops is None:
            ready.append(piece)
            return
        if self.matched_stop is not None:
            return
        matched, end, self._stop_state = self._stops.scan(
            piece.text, state=self._stop_state, may_match=self._num_tokens >= self._min_tokens
        )
        end += self._held_chars
        self._held.append(piece)
        self._held_chars += len(piece.text)
        if matched is None:
            self._release(self._held_chars - self._stops.depth(self._stop_state), ready)
            return
        self.matched_stop = matched
        self._release(end if self._include_stop else end - len(matched), ready, may_split_tags=True)
        self._held.clear()
        self._held_chars = 0

    def _release(
        self, num_chars: int, ready: list[TextPiece], *, may_split_tags: bool = False
    ) -> None:
        """Move `num_chars` held characters to `ready`. Split added tokens if `may_split_tags`."""
        while num_chars > 0:
            piece = self._held[0]
            if len(piece.text) <= num_chars:
                self._held.popleft()
            elif (
                not may_split_tags
                and piece.token_id is not None
                and self._tokenizer.is_added(piece.token_id)
            ):
                return
            else:
                self._held[0] = TextPiece(piece.text[num_chars:], None)
                piece = TextPiece(piece.text[:num_chars], None)
            ready.append(piece)
            num_chars -= len(piece.text)
            self._held_chars -= len(piece.text)
