"""Data classes without torch for all packages: model specs, KV caches, quantization, grammars."""
