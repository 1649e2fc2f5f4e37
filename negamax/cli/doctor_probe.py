"""Print import errors and the GPUs of this machine as JSON, for `negamax doctor`."""

import json
from importlib import import_module
from typing import Any

_MODULES = ("negamax.cli.main", "negamax.api.server")  # modules that import all parts of a server


def main() -> None:
    """Print the GPUs of this machine and import errors."""
    found: dict[str, Any] = {}
    try:
        found |= _look()
    except Exception as error:
        found["error"] = _text(error)
    try:
        for module in _MODULES:
            import_module(module)
    except Exception as error:
        found["negamax_error"] = _text(error)
    print(json.dumps(found))


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _look() -> dict[str, Any]:
    import torch

    from negamax.kernels.platform import cpu_computes_bf16

    cuda = torch.cuda
    numbers = range(cuda.device_count() if cuda.is_available() else 0)
    gpus = []
    for index in numbers:
        free, total = cuda.mem_get_info(index)
        others = (other for other in numbers if other != index)
        found = {
            "name": cuda.get_device_name(index),
            "total_bytes": total,
            "free_bytes": free,
            "capability": list(cuda.get_device_capability(index)),
            "amd_arch": None
            if torch.version.hip is None
            else cuda.get_device_properties(index).gcnArchName.partition(":")[0],
            "peers": [other for other in others if cuda.can_device_access_peer(index, other)],
        }
        gpus.append(found)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpus": gpus,
        "cpu_bfloat16": cpu_computes_bf16(),
    }


if __name__ == "__main__":
    main()
