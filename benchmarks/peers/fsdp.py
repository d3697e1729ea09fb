"""Time of a train step with PyTorch's fully_shard and FullyShardedDataParallel, for `tessera bench fsdp`: 2 and 4 processes,
gloo, CPU, one thread each. Models, data and timing are those of tp.py. The MLP is one unit. The GPT has
one unit per block and one for the rest.

Prints a JSON line per case: {"case": "mlp/2/-/fully_shard", "value": ms, "plain": ms of one independent copy per
rank}.
"""
import json
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tp import GPT, MLP, Block, gpt_step, medians_ms, mlp_step
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import init_device_mesh


def per_parameter(model, mesh):
    for block in getattr(model, "b", []):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def flat(model, mesh):
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
    )


def work(rank, world, store):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for variant, shard in (("fully_shard", per_parameter), ("fsdp", flat)):
        for name, count, step, model in (("mlp", 20, mlp_step, MLP), ("gpt", 2, gpt_step, GPT)):
            value, plain = medians_ms(count, step(shard(model(), mesh)), step(model()))
            if rank == 0:
                row = {"case": f"{name}/{world}/-/{variant}", "value": round(value, 4), "plain": round(plain, 4)}
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (ranks, f"{folder}/store"), nprocs=ranks)
