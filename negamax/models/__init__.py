"""Model families: a folder with `config`, `names`, `chat`, `model` and `init`, and a registry line.

Only `model.py`, `decoder.py` and `build.py` import torch.
"""
