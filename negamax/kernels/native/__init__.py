"""Row-wise CPU ops in C, compiled at first use on machines with a C compiler.

Each PyTorch op costs about 3 us of dispatch, most of a small model's step. One C function replaces
4 to 22 of them.
"""
