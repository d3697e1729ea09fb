"""Time of an optimizer step on 1,000 small parameters with PyTorch's DTensor, for `tessera bench optim`: 1 and 2 processes,
gloo, CPU, one thread each; 32 x 32 and 4 x 4, placement Shard(0), gradients of the same placement.

Prints a JSON line per case: {"case": "adamw/1/1000x32x32/fused", "value": us with DTensor, "plain": us on plain tensors
with the local sizes}. Each figure is the best of several repetitions, DTensor and plain alternating, in CPU time of the
process.
"""
import itertools
import json
import os
import tempfile
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

REPETITIONS = 8
STEPS = 2  # per repetition
PARAMETERS, SIDES = 1000, (32, 4)

CASES = {
    "adamw/{}/fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam/{}/foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "sgd/{}/foreach": lambda p: torch.optim.SGD(p, momentum=0.9, foreach=True),
}


def values(side, scale):
    return torch.sin(torch.arange(side * side, dtype=torch.float) * scale).view(side, side)


def parameters(mesh, side, plain):
    def make(t):
        sharded = distribute_tensor(t, mesh, [Shard(0)])
        return sharded.to_local().clone() if plain else sharded

    made = []
    for _ in range(PARAMETERS):
        made.append(torch.nn.Parameter(make(values(side, 0.1))))
        made[-1].grad = make(values(side, 0.3))
    return made


def seconds_for(step):
    start = time.process_time()
    for _ in range(STEPS):
        step()
    return time.process_time() - start


def best_us(*steps):
    samples = [[] for _ in steps]
    for _ in range(REPETITIONS + 1):
        for step, into in zip(steps, samples):
            into.append(seconds_for(step) / STEPS * 1e6)
    return [min(s[1:]) for s in samples]  # the first one is warm-up


def work(rank, world, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for side, (name, make) in itertools.product(SIDES, CASES.items()):
        value, plain = best_us(*(make(parameters(mesh, side, plain)).step for plain in (False, True)))
        if rank == 0:
            case = name.format(f"{world}/{PARAMETERS}x{side}x{side}")
            print(json.dumps({"case": case, "value": round(value, 1), "plain": round(plain, 1)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (ranks, f"{folder}/store"), nprocs=ranks)
