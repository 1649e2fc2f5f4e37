"""Use xgrammar to compile grammars for one vocabulary, and to match tokens.

Only the grammar process imports this module, because xgrammar imports torch, which takes seconds.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock

import numpy as np
import xgrammar
from numpy.typing import NDArray

from negamax.config.grammar import refuse_grammar
from negamax.text.grammar.dead_ends import find_dead_end
from negamax.text.tokenizer import Tokenizer

CACHE_BYTES = 512 << 20
CACHE_ENTRIES = 512

Mask = NDArray[np.uint8]  # [ceil(vocabulary / 8)] bytes; bit i of byte j allows token 8 j + i

_TAG_PREFIX = b"\xff\xff"  # bytes of invalid UTF-8, which no grammar of texts can match


class GrammarCompiler:
    """Compiles structural tags, and caches recently used grammars. This class is thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_threads: int,
        token_tags: Collection[str],
    ) -> None:
        """`vocab_size` may include padding tokens. Grammars match `token_tags` only as tokens."""
        self.vocab_size = vocab_size
        vocabulary = [_spell(tokenizer, token_id, token_tags) for token_id in range(vocab_size)]
        info = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=list(eos_token_ids),
        )
        self._stop_token_ids = frozenset(eos_token_ids)
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=num_threads, cache_enabled=False
        )
        ids = (tokenizer.token_id(tag) for tag in sorted(token_tags))
        self.tags = TagBits([i for i in ids if i is not None and i < vocab_size])
        self._lock = Lock()
        # structural tag -> grammar, in order of last use
        self._cache: OrderedDict[str, xgrammar.CompiledGrammar] = OrderedDict()

    def match(self, compiled: xgrammar.CompiledGrammar) -> "GrammarMatcher":
        return GrammarMatcher(compiled)

    def compile(self, structural_tag: str) -> xgrammar.CompiledGrammar:
        """Compile `structural_tag`. Raises `InvalidRequestError` for an invalid tag."""
        with self._lock:
            known = self._cache.get(structural_tag)
            if known is not None:
                self._cache.move_to_end(structural_tag)
                return known
        try:
            grammar = xgrammar.Grammar.from_structural_tag(structural_tag)
            problem = find_dead_end(grammar.serialize_json(), stop_token_ids=self._stop_token_ids)
            if problem is not None:
                refuse_grammar(f"{problem}; make recursive references optional or nullable")
            compiled = self._compiler.compile_structural_tag(structural_tag)
        except (RuntimeError, ValueError) as error:  # xgrammar raises no other exceptions
            refuse_grammar(f"the grammar cannot be compiled: {_read_reason(error)}")
        with self._lock:
            self._cache[structural_tag] = compiled
            num_bytes = sum(entry.memory_size_bytes for entry in self._cache.values())
            while len(self._cache) > 1 and (
                num_bytes > CACHE_BYTES or len(self._cache) > CACHE_ENTRIES
            ):
                _, oldest = self._cache.popitem(last=False)
                num_bytes -= oldest.memory_size_bytes
        return compiled


class TagBits:
    """Mask bits of the tags that are tokens. In raw text up to a closing tag, xgrammar allows every
    token, including all tags. Where a grammar requires a tag, xgrammar allows only some tags.
    Therefore, if a mask allows all tags, the output is in raw text.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._bits = [(token_id // 8, 1 << token_id % 8) for token_id in token_ids]

    def clear(self, mask: Mask) -> None:
        """Forbid all tags in `mask` if the output is in raw text."""
        if all(mask[place] & bit for place, bit in self._bits):
            for place, bit in self._bits:
                mask[place] &= 0xFF ^ bit


class GrammarMatcher:
    """The state of one output in its grammar. Only one thread may use an object at a time."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)

    @property
    def has_ended(self) -> bool:
        """Whether the grammar has accepted an end token, which ended the output."""
        return bool(self._matcher.is_terminated())

    def take(self, part: int | bytes) -> bool:
        """Advance by the token or text `part`, or return False if the grammar forbids `part`."""
        if self.has_ended:
            return True  # tokens after the end of the grammar are not checked
        taken = (
            self._matcher.accept_token(part)
            if isinstance(part, int)
            else self._matcher.accept_string(part)
        )
        return bool(taken)

    def take_back(self, count: int) -> None:
        """Undo the last `count` calls of `take`."""
        self._matcher.rollback(count)

    def mask(self, compiler: GrammarCompiler) -> Mask:
        """Return the mask of the allowed next tokens. The output must not have ended."""
        words = np.zeros((1, -(-compiler.vocab_size // 32)), dtype=np.int32)
        self._matcher.fill_next_token_bitmask(words, 0)
        mask: Mask = words.view(np.uint8)[0][: -(-compiler.vocab_size // 8)]
        compiler.tags.clear(mask)
        return mask


def _spell(tokenizer: Tokenizer, token_id: int, token_tags: Collection[str]) -> bytes:
    """Return a token's bytes, but b"" for control tokens and invalid UTF-8 for `token_tags`."""
    text = tokenizer.token_bytes(token_id)
    if not tokenizer.is_added(token_id):
        return text
    if text.decode() in token_tags:
        return _TAG_PREFIX + text
    return b"" if tokenizer.is_special(token_id) else text


def _read_reason(error: Exception) -> str:
    """Return xgrammar's message without the position in its source code."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text.rsplit(" is false: ", 1)[-1].split(".cc:", 1)[-1].lstrip("0123456789: ")[:500]
