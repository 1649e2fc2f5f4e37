"""Row-wise CPU ops in C, compiled at first use where the machine has a C compiler; elsewhere the
other providers serve.

Each PyTorch op costs about 3 us of dispatch in the forward pass, whatever it computes: a small
model spends most of a step on it. One C function per op of the house takes the place of 4 to 22 of
them.
"""
