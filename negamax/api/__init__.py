"""HTTP servers for the APIs of OpenAI, Anthropic and SGLang in front of the engine."""
