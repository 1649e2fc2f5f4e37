"""Grammars of structured output, written for the compiler xgrammar."""
