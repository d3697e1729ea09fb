"""Time of the ops of `tessera bench dispatch` with PyTorch's DTensor: a mesh of one, gloo, CPU, one thread, 8 x 8.

Prints a JSON line per case: {"case": "add/1/-/hit", "value": us with DTensor, "plain": us without}. Each figure is the
median of several repetitions, DTensor and plain alternating, so that a machine that slows down affects both.
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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

REPETITIONS = 9
SECONDS = 0.05  # approximate time of a repetition
LIST = 200


def seconds_for(function, calls):
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - start


def calls_for(function):
    """Number of calls per repetition. This also warms up caches."""
    calls = 1
    while seconds_for(function, calls) < SECONDS / 2:
        calls *= 2
    return calls


def medians_us(*functions):
    calls = [calls_for(f) for f in functions]
    samples = [[] for _ in functions]
    for _ in range(REPETITIONS):
        for f, n, into in zip(functions, calls, samples):
            into.append(seconds_for(f, n) / n * 1e6)
    return [statistics.median(s) for s in samples]


def cases(mesh):
    """(case, with DTensor, plain or None)"""
    plain = torch.randn(8, 8)
    shard, replicated = distribute_tensor(plain, mesh, [Shard(0)]), distribute_tensor(plain, mesh, [Replicate()])
    # zeros stay zeros when they are added to themselves 1e6 times
    zeros, zeros_d = torch.zeros(8, 8), distribute_tensor(torch.zeros(8, 8), mesh, [Shard(0)])
    many = [torch.zeros(8, 8) for _ in range(LIST)]
    many_d = [distribute_tensor(t, mesh, [Shard(0)]) for t in many]

    yield "add/1/-/hit", lambda: shard + shard, lambda: plain + plain
    yield "mm/1/-/hit", lambda: torch.mm(shard, replicated), lambda: torch.mm(plain, plain)
    yield "t/1/-/hit", lambda: shard.t(), lambda: plain.t()
    yield "detach/1/-/hit", lambda: shard.detach(), lambda: plain.detach()
    yield "view/1/-/hit", lambda: shard.view(8, 2, 4), lambda: plain.view(8, 2, 4)
    yield "cat/1/-/hit", lambda: torch.cat([shard, shard], 1), lambda: torch.cat([plain, plain], 1)
    yield "add_/1/-/hit", lambda: zeros_d.add_(zeros_d), lambda: zeros.add_(zeros)
    yield "native_dropout/1/-/hit", lambda: torch.native_dropout(shard, 0.5, True), lambda: torch.native_dropout(plain, 0.5, True)
    yield f"_foreach_add_/1/{LIST}/hit", lambda: torch._foreach_add_(many_d, many_d), lambda: torch._foreach_add_(many, many)
    yield f"_foreach_add/1/{LIST}/hit", lambda: torch._foreach_add(many_d, many_d), lambda: torch._foreach_add(many, many)
    yield "redistribute_R_S/1/-/hit", lambda: replicated.redistribute(mesh, [Shard(0)]), None
    yield "redistribute_S_R/1/-/hit", lambda: shard.redistribute(mesh, [Replicate()]), None


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # a file instead of a port: no conflicts
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        with torch.no_grad():
            for case, ours, plain in cases(init_device_mesh("cpu", (1,))):
                figures = medians_us(ours, plain) if plain else medians_us(ours)
                row = {"case": case, "value": round(figures[0], 4)}
                if plain:
                    row["plain"] = round(figures[1], 4)
                print(json.dumps(row), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
