"""Grammars that the engine enforces, in the compiler's form."""
