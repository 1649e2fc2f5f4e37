"""OpenAI's /v1/chat/completions."""
