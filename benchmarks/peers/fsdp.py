"""Time of a train step with PyTorch's fully_shard and FullyShardedDataParallel, for `tessera bench fsdp`: 2 and 4 processes,
gloo, CPU, one thread each. Models, data and timing are those of tp.py. The MLP is one unit. The GPT has
one unit per block and one for the rest.

Prints a JSON line per case: {"case": "mlp/2/-/fully_shard", "value": ms, "plain": ms of one independent copy per
rank}.
"""
import torch
from tp import GPT, MLP, Block, gpt_step, medians_ms, mlp_step, print_row, spawn
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


def work(rank, world):
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (world,))
    for variant, shard in (("fully_shard", per_parameter), ("fsdp", flat)):
        for name, count, step, model in (("mlp", 20, mlp_step, MLP), ("gpt", 2, gpt_step, GPT)):
            value, plain = medians_ms(count, step(shard(model(), mesh)), step(model()))
            print_row(rank, f"{name}/{world}/-/{variant}", value, plain)


if __name__ == "__main__":
    spawn(work)
