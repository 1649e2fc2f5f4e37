"""Run each GPU kernel once on its op's small cases, for compute-sanitizer.

compute-sanitizer --tool memcheck python tools/sanitize_kernels.py [--op NAME ...]
compute-sanitizer --tool racecheck python tools/sanitize_kernels.py
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

# With separate allocations the sanitizer checks the borders of each tensor.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from negamax.formats.floats import PLAIN
from negamax.kernels.registry import OPS, gpu_kernels
from tests.kernel_cases import CASES
from tests.kernel_cases.bindings import map_tensors


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", action="append", choices=sorted(OPS), help="default: all")
    chosen = parser.parse_args().op or sorted(OPS)
    if not torch.cuda.is_available():
        print("PyTorch finds no GPU here", file=sys.stderr)
        return 2
    count = 0
    for kernel in gpu_kernels():
        if kernel.provider == "reference" or kernel.op not in chosen or not kernel.reads(PLAIN):
            continue
        op = kernel.op
        for dtype in (torch.bfloat16, torch.float16):
            if dtype not in kernel.dtypes:
                continue
            for case in CASES[op].small(dtype, torch.Generator().manual_seed(0)):
                if not kernel.reads(case.stored):
                    continue
                on_gpu = replace(case, tensors=map_tensors(case.tensors, torch.Tensor.cuda))
                with torch.inference_mode():
                    CASES[op].apply(kernel, on_gpu)
                torch.cuda.synchronize()
                count += 1
                name = f"{kernel.op} {kernel.provider} {str(dtype).removeprefix('torch.')}"
                print(f"{name}: {case.label}", flush=True)
    print(f"{count} runs")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
