"""Schemas that dialects share. Requests are pydantic models, and answers are msgspec structs."""
