"""The model's ops: a folder of references and kernels per family, and a registry of all kernels."""
