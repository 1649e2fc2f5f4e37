"""Tokenizer, chat template, detokenizer, output parser and grammars, without model families."""
