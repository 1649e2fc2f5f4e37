"""What goes over HTTP: requests as pydantic models (checked), answers as msgspec structs (encoded
once per chunk).
"""
