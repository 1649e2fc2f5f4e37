"""Anthropic's routes: messages."""
