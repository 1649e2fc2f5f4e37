"""Model families: one folder per family. `registry.py` lists the families.

Only `model.py`, `decoder.py` and `build.py` import torch.
"""
