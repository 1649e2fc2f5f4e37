"""Model families. Each model family has a subfolder. `registry.py` lists the families.

The modules for config, chat formats and tensor names do not import torch.
"""
