"""One rank: the state of requests, the KV caches, the model and the sampler."""
