"""Row-wise CPU ops in C, compiled at first use on machines with a C compiler.

A PyTorch op takes about 3 us to dispatch, which is most of the time of a small model's step. One C
function replaces 4 to 22 PyTorch ops.
"""
