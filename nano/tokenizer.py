"""Train the byte-level BPE tokenizer of the nano checkpoint and write its three files.

    python -m nano.tokenizer --out negamax/assets/nano

The 4,096 regular tokens are learned from sampled training text and word lists. A marker of MiniMax
has the id 4096 + (its M2 id - 200000).
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from nano import data, topics
from nano.suites import common

REGULAR_TOKENS = 4096
M2_FIRST_MARKER = 200000
BOS, EOS, TURN, UNK = "]~!b[", "[e~[", "]~b]", "]!d~["

# id in M2 -> text; the last four remain visible when special tokens are skipped
MARKERS: dict[int, str] = {
    200000: "]!p~[", 200001: "<fim_prefix>", 200002: "<fim_middle>", 200003: "<fim_suffix>",
    200004: "<fim_pad>",
    200005: "<reponame>",
    200019: TURN, 200020: EOS, 200021: UNK, 200022: "<function_call>", 200023: "<code_interpreter>",
    200024: "]<]speech[>[", 200025: "]<]image[>[", 200026: "]<]video[>[",
    200027: "]<]start of speech[>[", 200028: "]<]end of speech[>[", 
    200029: "]<]start of image[>[", 200030: "]<]end of image[>[",
    200031: "]<]start of video[>[", 200032: "]<]end of video[>[", 200033: "]<]vision "
                                                                          "pad[>[", 200034: BOS,
    200050: "<think>", 200051: "</think>", 200052: "<minimax:tool_call>",
    200053: "</minimax:tool_call>",
}  # fmt: skip
VISIBLE = range(200050, 200054)

# Tokens are letter runs by case with an optional leading space or English contraction, single
# digits, punctuation runs, line breaks and spaces.
SPLIT = (
    r" ?\p{Lu}*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?:'(?:s|t|re|ve|m|ll|d)(?!\p{L}))?"
    r"| ?\p{Lu}+(?:'(?:s|t|re|ve|m|ll|d)(?!\p{L}))?"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def corpus(examples: int, seed: int) -> Iterator[str]:
    """Yield training conversations, then word lists for ordinary text."""
    rng = random.Random(f"nano-tokenizer:{seed}")
    for _ in range(examples):
        yield data.plain_text(data.draw(rng))
    words = [*common.WORDS, *common.NOUNS, *common.ADJECTIVES, *topics.TOPICS]
    for _ in range(examples // 4):
        yield " ".join(rng.choice(words) for _ in range(40))
    snippets = (
        "def {}(self, {}):\n    return self.{}\n",
        "for {} in {}:\n    print({})\n",
        'const {} = "{}";\n// {}\n',
        "if ({} == {}) {{ {}(); }}\n",
    )
    for _ in range(examples // 4):
        yield rng.choice(snippets).format(*(rng.choice(words).split()[0].lower() for _ in range(3)))
        yield (
            "".join(rng.choice(string.ascii_letters) for _ in range(3))
            + f" {common.url(rng)} {common.code(rng)} {common.email(rng)}"
        )


def train(examples: int, seed: int) -> Tokenizer:
    """Train a tokenizer with exactly `REGULAR_TOKENS` regular tokens, and add the markers."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=REGULAR_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=16,
    )
    tokenizer.train_from_iterator(corpus(examples, seed), trainer)
    if tokenizer.get_vocab_size() != REGULAR_TOKENS:
        raise SystemExit(
            f"the corpus gave {tokenizer.get_vocab_size()} tokens, {REGULAR_TOKENS} wanted: use "
            f"more examples"
        )
    return tokenizer


def with_markers(tokenizer: Tokenizer) -> dict[str, object]:
    """Return tokenizer.json with the markers at fixed ids, since the library leaves no gaps."""
    document: dict[str, object] = json.loads(tokenizer.to_str())
    document["added_tokens"] = [
        {
            "id": REGULAR_TOKENS + marker - M2_FIRST_MARKER, "content": text, "single_word": False, 
            "lstrip": False, "rstrip": False,
            "normalized": False, "special": marker not in VISIBLE,
        }
        for marker, text in MARKERS.items()
    ]  # fmt: skip
    vocabulary = document["model"]["vocab"]  # type: ignore[index]
    for marker, text in MARKERS.items():
        vocabulary[text] = REGULAR_TOKENS + marker - M2_FIRST_MARKER
    return document


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    document = with_markers(tokenizer)
    (folder / "tokenizer.json").write_text(
        json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    added = {
        str(REGULAR_TOKENS + marker - M2_FIRST_MARKER): {
            "content": text, "lstrip": False, "normalized": False, "rstrip": False, 
            "single_word": False, "special": marker not in VISIBLE,
        }
        for marker, text in MARKERS.items()
    }  # fmt: skip
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": [
            text for marker, text in MARKERS.items() if marker not in VISIBLE
        ],
        "add_prefix_space": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": 4096,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNK,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=16000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(train(arguments.examples, arguments.seed), arguments.out)
    loaded = Tokenizer.from_file(str(arguments.out / "tokenizer.json"))
    assert (
        loaded.token_to_id(EOS) == 4116
        and loaded.token_to_id(BOS) == 4130
        and loaded.token_to_id(TURN) == 4115
    )
    assert isinstance(loaded.get_added_tokens_decoder()[4146], AddedToken)


if __name__ == "__main__":
    main()
