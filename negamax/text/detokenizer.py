"""Convert token ids to text as the ids arrive. The text consists of whole UTF-8 characters."""

import codecs
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import msgspec

from negamax.text.stop_strings import StopMatcher, StoppableText
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
    With stop strings, the returned pieces have no token ids.
    """

    __slots__ = (
        "_decoder", "_mid_character", "_min_tokens", "_num_tokens", "_skip_special", "_stops",
        "_texts", "_tokenizer", "_whole",
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
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._mid_character = False
        self._num_tokens = 0  # number of tokens so far, which is counted only for stop strings
        self._texts: list[str] = []  # text that cannot be part of a stop string
        self._stops: StoppableText | None = None
        if stop:
            self._stops = StoppableText(
                self._texts.append, StopMatcher(stop), is_included=include_stop_str_in_output
            )
            self._stops.begin(is_before_word=False)

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, or None."""
        return None if self._stops is None else self._stops.matched

    def push(self, token_ids: Sequence[int]) -> list[TextPiece]:
        """Add token ids. Return all text, held or new, that cannot be part of a stop string."""
        pieces: list[TextPiece] = []
        for token_id in token_ids:
            whole = None if self._mid_character else self._whole.get(token_id)
            if whole is not None:
                pieces.append(whole)
            elif not (self._skip_special and self._tokenizer.is_special(token_id)):
                pieces += self._decode(token_id)
            if self._stops is not None:
                self._num_tokens += 1
                self._stops.may_match = self._num_tokens >= self._min_tokens
                self._search(self._stops, pieces)
                if self._stops.matched is not None:
                    break
        return pieces if self._stops is None else self._take_text()

    def finish(self) -> list[TextPiece]:
        """End the answer, and return the text held back. An incomplete character becomes U+FFFD."""
        pieces = [self._unfinished_character()] if self._mid_character else []
        if self._stops is None:
            return pieces
        self._search(self._stops, pieces)
        self._stops.release()
        return self._take_text()

    def _search(self, stops: StoppableText, pieces: list[TextPiece]) -> None:
        """Move the text of `pieces` to `stops`."""
        for piece in pieces:
            stops.write(piece.text)
        pieces.clear()

    def _take_text(self) -> list[TextPiece]:
        text = "".join(self._texts)
        self._texts.clear()
        return [TextPiece(text, None)] if text else []

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
