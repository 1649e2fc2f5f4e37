"""One rank: persistent rows, the KV caches, the model runner and the sampler."""
