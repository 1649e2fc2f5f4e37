"""HTTP: the OpenAI-compatible server in front of the engine. Knows requests and answers; never a
tensor.
"""
