"""Models trained under PyTorch's DistributedDataParallel and replicate(): losses, gradients and parameters of every step,
and the buckets. Each case "name" is a row texts[name] = "net cap=400 hook=bf16 ..."; see data_parallel_test.cpp, which
has the same model. tensors: name/weights/..., name/inputs and name/targets of (steps, passes, ranks, ...)."""
import multiprocessing
import os
import sys
import tempfile
import warnings
from datetime import timedelta

import models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import answer
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

warnings.filterwarnings("ignore")


# models.py has its own attention and gelu. Here the kernels are to be those of tessera/models: bits are compared.
def causal_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


models.causal_attention = causal_attention
models.GPT2MLP.forward = lambda self, x: self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("l0", "l1", "l2", "even", "odd"):
            self.add_module(name, nn.Linear(6, 6))

    def forward(self, x, branches):
        for layer in (self.l0, self.l1, self.l2):
            x = torch.tanh(layer(x))
        if branches & 1:
            x = x + self.even(x)
        return x + self.odd(x) if branches & 2 else x


def model_of(row, case, tensors):
    if row["model"] == "gpt2":
        return models.model_of(row["settings"].replace(",", " "), case, tensors)
    model, start = Net(), f"{case}/weights/"
    model.load_state_dict({k[len(start) :]: v for k, v in tensors.items() if k.startswith(start)}, strict=True)
    return model


def bf16_compress(state, bucket):  # DDP refuses the hook by its name where there is no NCCL; gloo can do it
    return default_hooks.bf16_compress_hook(state, bucket)


HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": bf16_compress}


def wrap(model, row):
    """The module to call, one that has set_sync(bool), and a function that gives the DDP inside."""
    options = {
        "bucket_cap_mb": int(row["cap"]) / (1 << 20),
        "find_unused_parameters": "unused" in row,
        "gradient_as_bucket_view": "view" in row,
        "static_graph": "static" in row,
    }
    if row.get("api") == "replicate":
        replicate(model, **options)
        if "hook" in row:
            model.register_comm_hook(None, HOOKS[row["hook"]])
        return model, model.set_requires_gradient_sync, lambda: replicate.state(model)._ddp
    ddp = DistributedDataParallel(model, **options)
    if "hook" in row:
        ddp.register_comm_hook(None, HOOKS[row["hook"]])

    def set_sync(sync):
        ddp.require_backward_grad_sync = sync  # what no_sync() sets

    return ddp, set_sync, lambda: ddp


def branches_of(row, step, rank):
    return (3, 1 << (rank % 2), 1 if rank == 0 else 0, 0)[step] if "unused" in row else 3


def train(case, row, rank, tensors):
    out, said = {}, {}
    torch.manual_seed(rank)
    model = model_of(row, case, tensors)
    with torch.no_grad():
        for p in model.parameters():
            p += rank  # the first rank's are what counts
    parameters = dict(model.named_parameters())
    wrapped, set_sync, ddp = wrap(model, row)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(row["lr"]))
    inputs, targets = tensors[f"{case}/inputs"], tensors[f"{case}/targets"]
    losses = []
    for step in range(inputs.size(0)):
        optimizer.zero_grad()
        for turn in range(inputs.size(1)):
            set_sync(turn + 1 == inputs.size(1))
            x, y = inputs[step, turn, rank], targets[step, turn, rank]
            if row["model"] == "gpt2":
                loss = F.cross_entropy(wrapped(x).flatten(0, 1), y.flatten())
            else:
                loss = F.mse_loss(wrapped(x, branches_of(row, step, rank)), y)
            loss.backward()
            losses.append(loss.detach())
        for name, p in parameters.items():
            if p.grad is not None:
                out[f"grads/{step}/{name}"] = p.grad.clone()
        optimizer.step()
        for name, p in parameters.items():
            out[f"parameters/{step}/{name}"] = p.detach().clone()
    out["losses"] = torch.stack(losses)
    data = ddp()._get_ddp_logging_data()
    for key in ("bucket_sizes", "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices"):
        said[key] = data.get(key, "").replace(",", " ,")
    return out, said


def train_all(rank, n, folder, tensors, texts):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{n}", n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=60))
    answers = {}, {}
    for case, text in texts.items():
        row = dict(word.split("=", 1) for word in text.split())
        if str(n) not in row["ranks"].split(","):
            continue
        for to, what in zip(answers, train(case, row, rank, tensors)):
            to.update({f"{case}/{n}/{rank}/{name}": value for name, value in what.items()})
    torch.save(answers, f"{folder}/answers{n}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


# Forked, not started anew: importing torch would take each of them seconds.
def train_on_worlds(tensors, texts):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("fork")
    out, said = {}, {}
    with tempfile.TemporaryDirectory(dir=os.path.dirname(sys.argv[2])) as folder:
        for n in (2, 4):
            ranks = [
                context.Process(target=train_all, args=(rank, n, folder, tensors, texts), daemon=True)
                for rank in range(n)
            ]
            for p in ranks:
                p.start()
            for rank, p in enumerate(ranks):
                p.join()
                if p.exitcode != 0:
                    sys.exit(f"rank {rank} of {n} ended with {p.exitcode}")
                for to, what in zip((out, said), torch.load(f"{folder}/answers{n}.{rank}", weights_only=False)):
                    to.update(what)
    return out, said


answer(train_on_worlds)
