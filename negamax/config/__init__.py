"""Descriptions shared by all rooms: model specs, KV caches, quantization, grammars. No torch."""
