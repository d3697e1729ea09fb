"""Ring attention in Python over gloo, for `tessera bench context`: 4 processes, CPU, one thread each; causal, (1, 4 heads,
8192 tokens, 64), float, forward and backward. PyTorch's context_parallel has no kernel for the CPU, so this ring merges
blocks of dense attention by their logsumexp, and leaves out blocks that the mask hides. Rank i has the i-th part of the
sequence.

Prints JSON lines: {"case": "attention/4/8192/all_to_all", "value": CPU ms of all ranks together} and the same for
"slowest", the largest CPU time of a rank. The best of 6.
"""
import json
import os
import tempfile
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(MALLOC_MMAP_THRESHOLD_=str(1 << 30), MALLOC_TRIM_THRESHOLD_=str(1 << 30))  # for the ranks
warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, HEADS, TOKENS, DIM = 4, 4, 8192, 64
SCALE = DIM**-0.5


def rotate(x):
    """Sends x to the next rank and returns that of the rank before."""
    rank, result = dist.get_rank(), torch.empty_like(x)
    ops = [
        dist.P2POp(dist.isend, x, (rank + 1) % RANKS),
        dist.P2POp(dist.irecv, result, (rank + RANKS - 1) % RANKS),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return result


def scores_of(q, k, causal):
    scores = (q * SCALE) @ k.transpose(-2, -1)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        rank, kv = dist.get_rank(), torch.stack([k, v])
        out, lse = None, None
        for step in range(RANKS):
            if step <= rank:
                scores = scores_of(q, kv[0], step == 0)
                block_lse = scores.logsumexp(-1, keepdim=True)
                block = (scores - block_lse).exp() @ kv[1]
                if step == 0:
                    out, lse = block, block_lse
                else:
                    merged = torch.logaddexp(lse, block_lse)
                    out = out * (lse - merged).exp() + block * (block_lse - merged).exp()
                    lse = merged
            if step + 1 < RANKS:
                kv = rotate(kv)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse = ctx.saved_tensors
        rank, kv, dkv = dist.get_rank(), torch.stack([k, v]), torch.zeros(2, *k.shape)
        dq, delta = torch.zeros_like(q), (gradient * out).sum(-1, keepdim=True)
        for step in range(RANKS):
            if step <= rank:
                p = (scores_of(q, kv[0], step == 0) - lse).exp()
                ds = p * (gradient @ kv[1].transpose(-2, -1) - delta) * SCALE
                dq += ds @ kv[0]
                dkv[0] += ds.transpose(-2, -1) @ q
                dkv[1] += p.transpose(-2, -1) @ gradient
            kv, dkv = rotate(kv), rotate(dkv)
        return dq, dkv[0], dkv[1]


def run_rank(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    full = [torch.randn(1, HEADS, TOKENS, DIM) for _ in range(3)]
    q, k, v = (x.chunk(RANKS, 2)[rank].contiguous().requires_grad_() for x in full)
    expected = torch.nn.functional.scaled_dot_product_attention(*full, is_causal=True).chunk(RANKS, 2)[rank]
    assert torch.allclose(RingAttention.apply(q, k, v), expected, atol=1e-5)
    best = [1e30, 1e30]
    for _ in range(6):
        dist.barrier()
        begin = time.process_time()
        RingAttention.apply(q, k, v).sum().backward()
        spent = time.process_time() - begin
        total, slowest = torch.tensor([spent]), torch.tensor([spent])
        dist.all_reduce(total)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        best = [min(b, s.item()) for b, s in zip(best, (total, slowest))]
    if rank == 0:
        for name, value in zip(("attention", "slowest"), best):
            for variant in ("all_gather", "all_to_all", "ulysses"):
                print(json.dumps({"case": f"{name}/{RANKS}/{TOKENS}/{variant}", "value": round(value * 1e3, 1)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (f"{folder}/store",), nprocs=RANKS)
