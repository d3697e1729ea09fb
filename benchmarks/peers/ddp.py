"""Time of a train step with PyTorch's DistributedDataParallel, for `tessera bench ddp`: 2 and 4 processes, gloo, CPU, one
thread each. Models, data and timing are those of tp.py.

Prints a JSON line per case: {"case": "mlp/2/-/ddp", "value": ms, "plain": ms of one independent copy per rank}.
"""
import torch
from tp import GPT, MLP, gpt_step, medians_ms, mlp_step, print_row, spawn
from torch.nn.parallel import DistributedDataParallel


def work(rank, world):
    torch.manual_seed(rank)
    for variant, view in (("ddp", False), ("ddp_view", True)):
        for name, count, step, model in (("mlp", 20, mlp_step, MLP), ("gpt", 2, gpt_step, GPT)):
            ddp = DistributedDataParallel(model(), gradient_as_bucket_view=view)
            value, plain = medians_ms(count, step(ddp), step(model()))
            print_row(rank, f"{name}/{world}/-/{variant}", value, plain)


if __name__ == "__main__":
    spawn(work)
