"""Runs a function on forked gloo ranks, and counts collectives."""
import multiprocessing
import os
import sys
import tempfile
import types
from datetime import timedelta

import torch
import torch.distributed as dist


def run_rank(function, rank, n, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{n}", n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=60))
    torch.save(function(rank, n), f"{folder}/result{n}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(worlds, function):
    """function(rank, n) returns (tensors, texts). Returns these dicts of all ranks, merged, for each n in worlds.
    Ranks are forked, because a new process would need seconds to import torch."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("fork")
    tensors, texts = {}, {}
    with tempfile.TemporaryDirectory(dir=os.path.dirname(sys.argv[2])) as folder:
        for n in worlds:
            ranks = [
                context.Process(target=run_rank, args=(function, rank, n, folder), daemon=True) for rank in range(n)
            ]
            for p in ranks:
                p.start()
            for rank, p in enumerate(ranks):
                p.join()
                if p.exitcode != 0:
                    sys.exit(f"rank {rank} of {n} exited with {p.exitcode}")
                result = torch.load(f"{folder}/result{n}.{rank}", weights_only=False)
                tensors.update(result[0])
                texts.update(result[1])
    return tensors, texts


def options_of(text):
    """{"api": "fsdp", ...} of "api=fsdp ..."."""
    return dict(word.split("=", 1) for word in text.split())


def comm_debug_mode():
    try:
        from torch.distributed.tensor.debug import CommDebugMode
    except ModuleNotFoundError:  # its package imports numpy for a plot, which is not installed
        sys.modules["numpy"] = types.ModuleType("numpy")
        from torch.distributed.tensor.debug import CommDebugMode

        del sys.modules["numpy"]
    return CommDebugMode()


def counts(mode):
    """ "all_reduce=5 all_gather_into_tensor=1" """
    return " ".join(f"{str(op).split('.')[-1]}={count}" for op, count in mode.get_comm_counts().items())
