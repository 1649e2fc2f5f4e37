"""Define requests of several APIs as pydantic models, and answers as msgspec structs."""
