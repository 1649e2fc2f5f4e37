"""Tokenizer, chat template, detokenizer, output parser and grammars, for all model families."""
