"""/tokenize and /detokenize of vLLM and SGLang."""
