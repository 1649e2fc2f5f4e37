"""Serve the APIs of OpenAI, Anthropic and SGLang over HTTP."""
