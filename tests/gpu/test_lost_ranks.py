import json
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from test_collectives import HIDDEN, several

from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.parallel.poll_control import PollControl


def waited(control: PollControl, context: ParallelContext, device: torch.device) -> float:
    from negamax.kernels.collectives import triton as kernels
    from negamax.kernels.norm import triton as norm_kernels

    norm = norm_kernels.prepare(torch.ones(HIDDEN, device=device).bfloat16(), 1e-6, quantize=True)
    x, residual = torch.zeros(2, 4, HIDDEN, device=device, dtype=torch.bfloat16)
    began = time.monotonic()
    kernels.all_reduce_add_rms(x, residual, norm, context.attention_group)
    torch.cuda.synchronize()
    assert control.is_aborted
    return time.monotonic() - began


def one_rank(rank: int, folder: str) -> None:
    """Let rank 0 call three times and write its waits to `folder`. Rank 1 never calls."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    context = ParallelContext.nccl(
        ParallelLayout(rank=rank, tp=2), f"{folder}/meet", device=device, hidden_size=HIDDEN,
        max_tokens=64, max_rows=8,
    )  # fmt: skip
    control = context.poll_control
    assert control is not None
    if rank == 0:
        waits = {}
        threading.Timer(0.5, control.abort).start()
        waits["aborted"] = waited(control, context, device)
        waits["aborted before"] = waited(control, context, device)
        control.words[1], control.words[2] = 700, 0
        threading.Thread(target=tick, args=(control,), daemon=True).start()
        waits["time is up"] = waited(control, context, device)
        Path(folder, "waits.json").write_text(json.dumps(waits))
    context.world_min(0)
    context.close()


def tick(control: PollControl) -> None:
    while True:
        control.tick(0.05)
        time.sleep(0.05)


@several
def test_waits_end_on_abort_and_at_their_time_limit() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(one_rank, args=(folder,), nprocs=2)
        waits = json.loads(Path(folder, "waits.json").read_text())
    print(waits)
    assert waits["aborted"] > 0.4  # The kernel compiles before it waits.
    assert waits["aborted before"] < 0.1
    assert 0.6 < waits["time is up"] < 1.5
