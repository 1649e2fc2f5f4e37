"""Write grammars of structured output for the compiler xgrammar."""
