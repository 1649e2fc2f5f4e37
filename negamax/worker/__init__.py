"""Run one rank, with the state of its requests, its KV caches, its model and its sampler."""
