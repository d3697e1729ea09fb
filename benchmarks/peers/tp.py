"""Time of a train step with PyTorch's tensor parallelism, for `tessera bench tp`: 2 and 4 processes, gloo, CPU, one thread
each. An MLP (10 -> 16 -> 10, batch 8) and a small GPT (256 wide, 4 layers, batch 4 x 128), AdamW.

Prints a JSON line per case: {"case": "mlp/2/-/tp", "value": ms, "plain": ms of one independent copy per rank}.
Each figure is the median of several repetitions, parallel and plain alternating.
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
import torch.nn.functional as F
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

REPETITIONS = 9
HEAD = 64


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 16), nn.Linear(16, 10)

    def forward(self, x):
        return self.net2(F.relu(self.net1(x)))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.w1, self.w2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, length, _ = x.shape
        y = self.n1(x)
        q, k, v = (m(y).view(batch, length, -1, HEAD).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.w2(F.gelu(self.w1(self.n2(x))))


class GPT(nn.Module):
    def __init__(self, dim=256, layers=4, vocabulary=256):
        super().__init__()
        self.e = nn.Embedding(vocabulary, dim)
        self.b = nn.ModuleList(Block(dim) for _ in range(layers))
        self.n, self.out = nn.LayerNorm(dim), nn.Linear(dim, vocabulary)

    def forward(self, x):
        x = self.e(x)
        for block in self.b:
            x = block(x)
        return self.out(self.n(x))


def mlp_step(model):
    adam, x = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randn(8, 10)

    def step():
        adam.zero_grad()
        model(x).sum().backward()
        adam.step()

    return step


def gpt_step(model):
    adam, tokens = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(0, 256, (4, 129))

    def step():
        adam.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        adam.step()

    return step


def mlp_parallel(mesh):
    return parallelize_module(MLP(), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})


def gpt_parallel(mesh):
    model = GPT()
    for block in model.b:
        plan = {name: ColwiseParallel() for name in ("q", "k", "v", "w1")}
        plan |= {name: RowwiseParallel() for name in ("o", "w2")}
        parallelize_module(block, mesh, plan)
    return model


def seconds_for(step, count):
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    dist.barrier()
    return time.perf_counter() - start


def medians_ms(count, *steps):
    samples = [[] for _ in steps]
    for repetition in range(REPETITIONS + 1):
        for step, into in zip(steps, samples):
            into.append(seconds_for(step, count) / count * 1e3)
    return [statistics.median(s[1:]) for s in samples]  # the first one is warm-up


def print_row(rank, case, value, plain):
    if rank == 0:
        print(json.dumps({"case": case, "value": round(value, 4), "plain": round(plain, 4)}), flush=True)


def run_rank(rank, world, store, body):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    body(rank, world)
    dist.destroy_process_group()


def spawn(body):
    """Runs body(rank, world) on 2 and on 4 processes."""
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (ranks, f"{folder}/store", body), nprocs=ranks)


def work(rank, world):
    torch.manual_seed(0)  # all ranks train on the same data
    mesh = init_device_mesh("cpu", (world,))
    for name, count, parallel, plain in (
        ("mlp", 20, mlp_step(mlp_parallel(mesh)), mlp_step(MLP())),
        ("gpt", 2, gpt_step(gpt_parallel(mesh)), gpt_step(GPT())),
    ):
        value, plain_value = medians_ms(count, parallel, plain)
        print_row(rank, f"{name}/{world}/-/tp", value, plain_value)


if __name__ == "__main__":
    spawn(work)
