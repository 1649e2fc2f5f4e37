"""Data classes for all packages: model specs, KV caches, quantization, grammars. No torch."""
