"""Train a small byte-level BPE with MiniMax's special tokens."""

import functools
import json

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from negamax.text.tokenizer import Tokenizer

CONTROL = ("]!p~[", "]~b]", "[e~[", "]!d~[", "<reponame>", "]<]vision pad[>[", "]~!b[")
TAGS = ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. STOP and think, then answer: stopping stone "
    "steps.",
    '<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n' * 3,
    "Größe naïve 日本語 日本 🙂🙂 العربية – “quotes” 👩‍🚀",
]


@functools.cache
def definition_text() -> str:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in CONTROL]
    )
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    return str(backend.to_str())


def config_text() -> str:
    return json.dumps({"bos_token": "]~!b[", "eos_token": {"content": "[e~["}})


def make_tokenizer() -> Tokenizer:
    return Tokenizer(definition_text(), config=json.loads(config_text()))
