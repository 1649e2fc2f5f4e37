"""How kernels that run one after the other are launched on a GPU."""
