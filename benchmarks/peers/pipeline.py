"""Overhead of PyTorch's pipeline schedules, for `tessera bench pipeline`: 4 processes, gloo, CPU, one thread each. Stages
of two Linear layers (128 wide), 16 microbatches of 16 rows.

Prints a JSON line per case: {"case": "mlp/4/16/1F1B", "value": us per microbatch, "plain": us per microbatch of the
forwards and backwards alone, at the same time on all ranks}. value - plain is the overhead. Medians of 31 steps,
alternating.
"""
import json
import os
import statistics
import tempfile
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

RANKS, MICROBATCHES, ROWS, WIDTH, STEPS = 4, 16, 16, 128, 31


def stage_module():
    layer = lambda: nn.Linear(WIDTH, WIDTH, bias=False)
    return nn.Sequential(layer(), nn.GELU(), layer(), nn.GELU())


def stage_indices(name, rank):
    if name in ("GPipe", "1F1B"):
        return [rank]
    if name in ("ZBVZeroBubble", "DualPipeV"):
        return [rank, 2 * RANKS - 1 - rank]
    return [rank, rank + RANKS]


def seconds(run):
    dist.barrier()
    begin = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - begin


def measure(name, rank):
    indices = stage_indices(name, rank)
    modules = [stage_module() for _ in indices]
    total = RANKS * len(indices)
    stages = [PipelineStage(m, i, total, torch.device("cpu")) for m, i in zip(modules, indices)]
    loss = lambda y, target: (y - target).square().mean()
    kind = get_schedule_class(name)
    schedule = kind(stages[0] if len(stages) == 1 else stages, MICROBATCHES, loss_fn=loss)
    x = torch.randn(MICROBATCHES * ROWS, WIDTH)
    arguments = (x,) if 0 in indices else ()
    options = {"target": x, "losses": []} if total - 1 in indices else {}

    def scheduled():
        schedule.step(*arguments, **options)

    def alone():
        for part in x.chunk(MICROBATCHES):
            for module in modules:
                module(part.detach().requires_grad_()).backward(torch.ones(ROWS, WIDTH))

    samples = [[], []]
    for _ in range(STEPS + 2):
        samples[0].append(seconds(scheduled))
        samples[1].append(seconds(alone))
    return [statistics.median(s[2:]) / MICROBATCHES * 1e6 for s in samples]


def run_rank(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        value, plain = measure(name, rank)
        if rank == 0:
            case = f"mlp/{RANKS}/{MICROBATCHES}/{name}"
            print(json.dumps({"case": case, "value": round(value, 1), "plain": round(plain, 1)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (f"{folder}/store",), nprocs=RANKS)
