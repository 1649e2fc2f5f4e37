"""Messages between the engine and its grammar process, as MessagePack. An empty frame ends it."""

import msgspec

from negamax.config.grammar import Grammar, Reasoning

Part = int | bytes  # of the content: a token, or bytes without a token of their own


class Setup(msgspec.Struct, frozen=True):
    """The first frame."""

    tokenizer_folder: str
    vocab_size: int  # the model's
    eos_token_ids: tuple[int, ...]
    num_threads: int
    compile_seconds: float  # for one grammar
    mask_seconds: float  # for one mask
    draft_seconds: float  # after a message: time to begin masks after draft tokens


class OpenGrammar(msgspec.Struct, frozen=True, tag="open"):
    """Compile a grammar and follow an output by it, named `key`."""

    key: int
    grammar: Grammar
    reasoning: Reasoning | None


class AdvanceGrammars(msgspec.Struct, frozen=True, tag="advance"):
    parts: list[tuple[int, list[Part], list[int]]]  # key, parts, draft tokens that may follow


class CloseGrammars(msgspec.Struct, frozen=True, tag="close"):
    keys: list[int]


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """First: the compiler is loaded. Later: the process is still working."""


class Overloaded(msgspec.Struct, frozen=True, tag="overloaded"):
    """A thread is stuck: replace this process when unused. `keys` are refused for good."""

    keys: list[int]
    message: str


class GrammarOpened(msgspec.Struct, frozen=True, tag="opened"):
    key: int
    mask: bytes  # mask of the first token: bit i of byte j allows token 8 j + i


class GrammarRefused(msgspec.Struct, frozen=True, tag="refused"):
    key: int
    message: str
    is_timeout: bool = False  # do not try again


class NextMask(msgspec.Struct, frozen=True, array_like=True):
    """The mask of an output after all parts that were sent."""

    key: int
    mask: bytes | None  # None: the grammar has ended
    error: str | None = None  # with a mask: the grammar allows no token here
    # masks after each draft token, as far as the grammar and the time allow
    after_drafts: list[bytes] = []


class NextMasks(msgspec.Struct, frozen=True, tag="masks"):
    masks: list[NextMask]


ToGrammars = OpenGrammar | AdvanceGrammars | CloseGrammars
FromGrammars = Beat | Overloaded | GrammarOpened | GrammarRefused | NextMasks

encoder = msgspec.msgpack.Encoder()
to_grammars: msgspec.msgpack.Decoder[ToGrammars] = msgspec.msgpack.Decoder(ToGrammars)
from_grammars: msgspec.msgpack.Decoder[FromGrammars] = msgspec.msgpack.Decoder(FromGrammars)
