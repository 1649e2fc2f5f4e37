"""Building blocks of a model on one rank: linear, basic (norm, rope, embedding, head), attention,
experts, weight slots.
"""
