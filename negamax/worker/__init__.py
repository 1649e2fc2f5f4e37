"""One rank: persistent rows, the KV pool, the model runner and the sampler."""
