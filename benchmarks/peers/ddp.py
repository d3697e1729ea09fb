"""Time of a train step with PyTorch's DistributedDataParallel, for `tessera bench ddp`: 2 and 4 processes, gloo, CPU, one
thread each. Models, data and timing are those of tp.py.

Prints a JSON line per case: {"case": "mlp/2/-/ddp", "value": ms, "plain": ms of one independent copy per rank}.
"""
import json
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tp import GPT, MLP, gpt_step, medians_ms, mlp_step
from torch.nn.parallel import DistributedDataParallel


def work(rank, world, store):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for variant, view in (("ddp", False), ("ddp_view", True)):
        for name, count, step, model in (("mlp", 20, mlp_step, MLP), ("gpt", 2, gpt_step, GPT)):
            ddp = DistributedDataParallel(model(), gradient_as_bucket_view=view)
            value, plain = medians_ms(count, step(ddp), step(model()))
            if rank == 0:
                row = {"case": f"{name}/{world}/-/{variant}", "value": round(value, 4), "plain": round(plain, 4)}
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (ranks, f"{folder}/store"), nprocs=ranks)
