"""Messages between the engine and grammar processes. An empty message asks a process to end."""

import msgspec

from negamax.config.grammar import Grammar, Reasoning

Part = int | bytes  # A part of an output's content: a token id, or some bytes of a token.
GrammarSpec = tuple[Grammar, Reasoning | None]


class Setup(msgspec.Struct, frozen=True):
    """The first message to the host process, which forks all grammar processes."""

    tokenizer_folder: str
    vocab_size: int  # The model's vocabulary size.
    eos_token_ids: tuple[int, ...]
    num_threads: int
    compile_seconds: float  # Time limit for compiling a grammar.
    mask_seconds: float  # Time limit for computing a mask.
    draft_seconds: float  # After this time, masks of positions after draft tokens are not begun.


class Fork(msgspec.Struct, frozen=True):
    """Asks the host process to fork. The message carries the descriptor of the fork's stdin."""

    address: str
    is_worker: bool  # Whether the process compiles a risky grammar.


class OpenGrammar(msgspec.Struct, frozen=True, tag="open"):
    """Asks a grammar process to compile a grammar for the output `key`."""

    key: int
    grammar: Grammar
    reasoning: Reasoning | None


class AdvanceGrammars(msgspec.Struct, frozen=True, tag="advance"):
    parts: list[tuple[int, list[Part], list[int]]]  # key, new parts, next drafts of each output


class CloseGrammars(msgspec.Struct, frozen=True, tag="close"):
    keys: list[int]


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A heartbeat. The first heartbeat reports that the process is ready."""


class GrammarOpened(msgspec.Struct, frozen=True, tag="opened"):
    key: int
    mask: bytes  # Mask of the output's first token: bit i of byte j allows token 8 j + i.


class GrammarIsRisky(msgspec.Struct, frozen=True, tag="risky"):
    """The grammar of outputs `keys` may be slow or crash, so the grammar needs a worker process."""

    keys: list[int]


class GrammarRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The process refuses the grammar of output `key`. The output may already have begun."""

    key: int
    message: str
    is_timeout: bool = False  # Whether a thread has exceeded a time limit and still runs.


class NextMask(msgspec.Struct, frozen=True, array_like=True):
    """The mask for the next token of an output, after all tokens that the engine has sent."""

    key: int
    mask: bytes | None  # None if the grammar has ended or has failed with `error`.
    error: str | None = None  # Reason why the grammar failed or allows no token.
    # `after_drafts`: a mask after each draft token, until the grammar rejects one or time is up.
    after_drafts: list[bytes] = []


class NextMasks(msgspec.Struct, frozen=True, tag="masks"):
    masks: list[NextMask]


ToGrammars = OpenGrammar | AdvanceGrammars | CloseGrammars
FromGrammars = Beat | GrammarOpened | GrammarIsRisky | GrammarRefused | NextMasks

encoder = msgspec.msgpack.Encoder()
to_grammars: msgspec.msgpack.Decoder[ToGrammars] = msgspec.msgpack.Decoder(ToGrammars)
from_grammars: msgspec.msgpack.Decoder[FromGrammars] = msgspec.msgpack.Decoder(FromGrammars)
