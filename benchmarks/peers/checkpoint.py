"""Time to save and load a checkpoint of 1 GB with torch.distributed.checkpoint, for `tessera bench checkpoint`: two
processes, gloo, DTensors sharded on dim 0, FileSystemWriter as dcp.save makes it, the best of three.

Prints a JSON line per case: {"case": "1gb/2/fp32/save", "value": ms}.
"""
import json
import os
import shutil
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, full
from tp import spawn

warnings.filterwarnings("ignore")


def milliseconds(call):
    dist.barrier()
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e3, result


def work(rank, world):
    if world != 2:
        dist.barrier()  # all have connected
        return
    mesh = init_device_mesh("cpu", (world,))
    dicts = [{f"layers.{i}.weight": full((2048, 2048), v + i, device_mesh=mesh, placements=[Shard(0)]) for i in range(64)}
             for v in (1.0, 0.0)]
    folder = os.path.join(tempfile.gettempdir(), "torch-bench-checkpoint")
    best = {"save": 1e9, "load": 1e9, "async_stall": 1e9}
    for _ in range(3):
        for name, call in (("save", lambda: dcp.save(dicts[0], checkpoint_id=folder)),
                           ("load", lambda: dcp.load(dicts[1], checkpoint_id=folder)),
                           ("async_stall", lambda: dcp.async_save(dicts[0], checkpoint_id=folder))):
            taken, result = milliseconds(call)
            best[name] = min(best[name], taken)
            if result is not None and hasattr(result, "result"):
                result.result()
    best["load_unverified"] = best["load"]  # DCP has no checksums
    best["save_new"] = best["save"]
    for name, value in best.items():
        if rank == 0:
            print(json.dumps({"case": f"1gb/{world}/fp32/{name}", "value": round(value, 4)}), flush=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


if __name__ == "__main__":
    spawn(work)
