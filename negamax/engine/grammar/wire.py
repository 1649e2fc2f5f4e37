"""Messages between the engine and its grammar process, as MessagePack. An empty frame ends it."""

import msgspec

from negamax.config.grammar import Grammar, Reasoning

Part = int | bytes  # of the content: a token, or bytes without a token of their own
GrammarSpec = tuple[Grammar, Reasoning | None]


class Setup(msgspec.Struct, frozen=True):
    """The first frame to the host."""

    tokenizer_folder: str
    vocab_size: int  # the model's
    eos_token_ids: tuple[int, ...]
    num_threads: int
    compile_seconds: float  # for one grammar
    mask_seconds: float  # for one mask
    draft_seconds: float  # after a message: time to begin masks after draft tokens


class Fork(msgspec.Struct, frozen=True):
    """A frame to the host, with the new process's standard input."""

    address: str
    is_worker: bool  # takes risky grammars


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
    """First: the process is ready. Later: it is still working."""


class GrammarOpened(msgspec.Struct, frozen=True, tag="opened"):
    key: int
    mask: bytes  # mask of the first token: bit i of byte j allows token 8 j + i


class GrammarIsRisky(msgspec.Struct, frozen=True, tag="risky"):
    """The grammar of `keys` may end or delay its process: it needs a worker."""

    keys: list[int]


class GrammarRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The grammar is refused, maybe while an output follows it."""

    key: int
    message: str
    is_timeout: bool = False  # do not try again: a thread is still busy


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
FromGrammars = Beat | GrammarOpened | GrammarIsRisky | GrammarRefused | NextMasks

encoder = msgspec.msgpack.Encoder()
to_grammars: msgspec.msgpack.Decoder[ToGrammars] = msgspec.msgpack.Decoder(ToGrammars)
from_grammars: msgspec.msgpack.Decoder[FromGrammars] = msgspec.msgpack.Decoder(FromGrammars)
