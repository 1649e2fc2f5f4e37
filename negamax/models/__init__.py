"""Model families. Each family has a folder. `registry.py` lists the families.

Only `model.py`, `decoder.py` and `build.py` import torch.
"""
