"""Schemas that dialects share: requests are pydantic models, answers are msgspec structs."""
