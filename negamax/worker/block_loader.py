"""Load host blocks into KV blocks of a GPU with 2D copies, which need no staging buffer. A thread
launches the copies, because a full queue of copies would stop the thread that launches steps.
"""

import ctypes
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from negamax.base.errors import EngineDeadError

MAX_PITCH = 2**31 - 1  # largest distance in bytes between the rows of a 2D copy
Launch = Future[torch.cuda.Event]  # resolves when copies are launched, with the event at their end
Pieces = list[tuple[list[int], list[int]]]  # KV blocks and their host blocks, in pieces


class BlockLoader:
    def __init__(self, kinds: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> None:
        """`kinds`: KV blocks and host blocks, [blocks, layers, words] int64, of all caches."""
        self._stream = torch.cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, "kv-load", torch.cuda.set_device, (device,))
        self._planes = [plane for kind in kinds for plane in split_planes(*kind)]
        library, prefix = ("amdhip64", "hip") if torch.version.hip else ("cudart", "cuda")
        version = str(torch.version.hip or torch.version.cuda).partition(".")[0]
        self._copy = ctypes.CDLL(f"lib{library}.so.{version}")[f"{prefix}Memcpy2DAsync"]
        size, address = ctypes.c_size_t, ctypes.c_void_p
        self._copy.argtypes = address, size, address, size, size, size, ctypes.c_int, address
        self.launch([([0], [0])], torch.cuda.Event()).result()  # fails if CUDA refuses the layout

    def launch(self, pieces: Pieces, ready: torch.cuda.Event) -> Launch:
        """Load `pieces` after `ready`. The launch ends when only the last piece may be pending."""
        return self._thread.submit(self._run, pieces, ready)

    def _run(self, pieces: Pieces, ready: torch.cuda.Event) -> torch.cuda.Event:
        stream, to_device = self._stream, 1
        with torch.cuda.stream(stream):  # also selects the device
            ready.wait()
            ended = stream.record_event(torch.cuda.Event(blocking=True))  # waits must not spin
            for blocks, places in pieces:
                for cache, pitch, host, stride, width, rows in self._planes:
                    for block, place in zip(blocks, places, strict=True):
                        columns = cache + block * width, pitch, host + place * stride, width, width
                        code = self._copy(*columns, rows, to_device, stream.cuda_stream)
                        if code:
                            raise EngineDeadError(f"CUDA error {code}: KV blocks were not loaded")
                last, ended = ended, stream.record_event(torch.cuda.Event(blocking=True))
                last.synchronize()  # host-sync: at most two pieces are in the queue
        return ended


def split_planes(cache: Tensor, host: Tensor) -> Iterator[tuple[int, ...]]:
    """Yield (address of KV block 0, bytes between its layers, address of host block 0, bytes of a
    host block, bytes of a layer of a block, number of layers) for each 2D copy of a block.
    """
    layers, width, pitch = host.shape[1], 8 * host.shape[2], 8 * cache.stride(1)
    rows = layers if width <= pitch <= MAX_PITCH else 1
    for layer in range(0, layers, rows):
        source = host[0, layer].data_ptr(), layers * width
        yield cache[0, layer].data_ptr(), pitch if rows > 1 else width, *source, width, rows
