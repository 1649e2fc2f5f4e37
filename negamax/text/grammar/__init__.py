"""Write grammars of structured output, which xgrammar compiles."""
