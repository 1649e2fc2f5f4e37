"""What the engine settles about Triton's compiler, whatever Triton's own default is."""

from __future__ import annotations

import os
import subprocess
import sys

OPTIONS = """
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from negamax.kernels.registry import gpu_kernels
gpu_kernels()
backend = backends["nvidia"].compiler(GPUTarget("cuda", 90, 32))
print(backend.parse_options({}).enable_fp_fusion)
"""


def test_kernels_are_compiled_with_fused_products_and_sums() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "0"}
    done = subprocess.run(
        [sys.executable, "-c", OPTIONS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["True"]
