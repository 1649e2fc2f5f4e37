"""Tokenize, render, detokenize and parse text, and write grammars, for all model families."""
