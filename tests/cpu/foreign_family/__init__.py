"""An architecture that Negamax does not know: two layers, the first dense and without experts, the
second with a mixture of experts and with attention to few selected keys, which it finds by a third
cache of another width. Norms of queries and keys run over each head by itself.

What stands here is all that a family adds (but for its line in `models/registry.py`).
"""
