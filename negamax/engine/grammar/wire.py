"""Messages between the engine and its grammar process: msgspec structs as MessagePack frames. An
empty frame ends it.
"""

from __future__ import annotations

import msgspec

from negamax.config.grammar import Grammar, Reasoning

Part = int | bytes  # of an output's content: a token, or text that came without a token of its own


class Setup(msgspec.Struct, frozen=True):
    """The first frame."""

    tokenizer_folder: str
    vocab_size: int  # of the model
    eos_token_ids: tuple[int, ...]
    num_threads: int
    compile_seconds: float  # that one grammar may take
    mask_seconds: float  # that one mask may take
    draft_seconds: float  # after a message, in which masks behind draft tokens are begun


# engine -> grammar process
class OpenGrammar(msgspec.Struct, frozen=True, tag="open"):
    """Compile, and follow an output by it under the name `key`."""

    key: int
    grammar: Grammar
    reasoning: Reasoning | None


class AdvanceGrammars(msgspec.Struct, frozen=True, tag="advance"):
    """Go on with each output by what it gained."""

    parts: list[tuple[int, list[Part], list[int]]]  # key, parts, draft tokens that may follow


class CloseGrammars(msgspec.Struct, frozen=True, tag="close"):
    keys: list[int]


# grammar process -> engine
class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """It lives: the first one says that the compiler is loaded, others that it is still at what it
    was asked.
    """


class Overloaded(msgspec.Struct, frozen=True, tag="overloaded"):
    """A thread is stuck in the library: this process should go when nobody needs it. One message
    with the refusals of those who waited for that thread, so that none of them is tried again.
    """

    keys: list[int]
    message: str


class GrammarOpened(msgspec.Struct, frozen=True, tag="opened"):
    key: int
    mask: bytes  # what the content may begin with: bit i of byte j allows token 8 j + i


class GrammarRefused(msgspec.Struct, frozen=True, tag="refused"):
    key: int
    message: str
    is_timeout: bool = False  # it would take as long again


class NextMask(msgspec.Struct, frozen=True, array_like=True):
    """What an output may go on with, after all parts that were sent."""

    key: int
    mask: bytes | None  # None: the grammar has ended
    error: str | None = None  # with a mask: of the grammar itself, which allows no token here
    # behind each of the draft tokens, as far as the grammar allows them and time is left
    behind_drafts: list[bytes] = []


class NextMasks(msgspec.Struct, frozen=True, tag="masks"):
    masks: list[NextMask]


ToGrammars = OpenGrammar | AdvanceGrammars | CloseGrammars
FromGrammars = Beat | Overloaded | GrammarOpened | GrammarRefused | NextMasks

encoder = msgspec.msgpack.Encoder()
to_grammars: msgspec.msgpack.Decoder[ToGrammars] = msgspec.msgpack.Decoder(ToGrammars)
from_grammars: msgspec.msgpack.Decoder[FromGrammars] = msgspec.msgpack.Decoder(FromGrammars)
