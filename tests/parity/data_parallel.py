"""Models trained with PyTorch's DistributedDataParallel and replicate(): losses, gradients and parameters of every
step, and the buckets. Each case "name" has options texts[name] = "model=net cap=400 hook=bf16 ...".
data_parallel_test.cpp has the same model. tensors: name/weights/..., name/inputs and name/targets of
(steps, passes, ranks, ...)."""
import warnings

import models
import torch
import torch.nn.functional as F
from harness import respond
from ranks import on_ranks, options_of
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

warnings.filterwarnings("ignore")


# models.py has its own attention and gelu. This test compares bits, so it uses the kernels of tessera/models.
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


class SparseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 6, sparse=True)
        self.l0, self.l1 = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, branches):
        return self.l1(torch.tanh(self.l0(self.words(x))))


def model_of(options, case, tensors):
    if options["model"] == "gpt2":
        return models.model_of(options["settings"].replace(",", " "), case, tensors)
    model, start = SparseNet() if options["model"] == "sparse" else Net(), f"{case}/weights/"
    model.load_state_dict({k[len(start) :]: v for k, v in tensors.items() if k.startswith(start)}, strict=True)
    return model


def bf16_compress(state, bucket):  # without NCCL, DDP rejects the hook by its name, but gloo supports it
    return default_hooks.bf16_compress_hook(state, bucket)


def power_sgd_state():
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1, random_seed=3
    )


# name: state and hook
HOOKS = {
    "fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "bf16": (lambda: None, bf16_compress),
    "powersgd": (power_sgd_state, powerSGD_hook.powerSGD_hook),
}


def register_hook(wrapped, name):
    state, hook = HOOKS[name]
    wrapped.register_comm_hook(state(), hook)



def wrap(model, options):
    """The module to call, set_sync(bool), and a function that returns the inner DDP."""
    arguments = {
        "bucket_cap_mb": int(options["cap"]) / (1 << 20),
        "find_unused_parameters": "unused" in options,
        "gradient_as_bucket_view": "view" in options,
        "static_graph": "static" in options,
    }
    if options.get("api") == "replicate":
        replicate(model, **arguments)
        if "hook" in options:
            register_hook(model, options["hook"])
        return model, model.set_requires_gradient_sync, lambda: replicate.state(model)._ddp
    ddp = DistributedDataParallel(model, **arguments)
    if "hook" in options:
        register_hook(ddp, options["hook"])

    def set_sync(sync):
        ddp.require_backward_grad_sync = sync  # as no_sync() does

    return ddp, set_sync, lambda: ddp


def branches_of(options, step, rank):
    return (3, 1 << (rank % 2), 1 if rank == 0 else 0, 0)[step] if "unused" in options else 3


def train(case, options, rank, tensors):
    out, texts = {}, {}
    torch.manual_seed(rank)
    model = model_of(options, case, tensors)
    with torch.no_grad():
        for p in model.parameters():
            p += rank  # rank 0's values are broadcast
    parameters = dict(model.named_parameters())
    wrapped, set_sync, ddp = wrap(model, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(options["lr"]))
    inputs, targets = tensors[f"{case}/inputs"], tensors[f"{case}/targets"]
    losses = []

    def one_step(step):
        optimizer.zero_grad()
        for micro in range(inputs.size(1)):
            set_sync(micro + 1 == inputs.size(1))
            x, y = inputs[step, micro, rank], targets[step, micro, rank]
            if options["model"] == "gpt2":
                loss = F.cross_entropy(wrapped(x).flatten(0, 1), y.flatten())
            else:
                loss = F.mse_loss(wrapped(x, branches_of(options, step, rank)), y)
            loss.backward()
            losses.append(loss.detach())
        for name, p in parameters.items():
            if p.grad is not None:
                out[f"grads/{step}/{name}"] = p.grad.to_dense().clone()
        optimizer.step()
        for name, p in parameters.items():
            out[f"parameters/{step}/{name}"] = p.detach().clone()

    steps = inputs.size(0)
    if "join" in options:  # ranks with an even number have half of the batches
        with wrapped.join(divide_by_initial_world_size=options["join"] == "all"):
            for step in range(steps if rank % 2 else steps // 2):
                one_step(step)
        for name, p in parameters.items():
            out[f"parameters/{steps}/{name}"] = p.detach().clone()
    else:
        for step in range(steps):
            one_step(step)
    out["losses"] = torch.stack(losses)
    data = ddp()._get_ddp_logging_data()
    for key in ("bucket_sizes", "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices"):
        texts[key] = data.get(key, "").replace(",", " ,")
    return out, texts


def train_all(tensors, texts):
    def on_rank(rank, n):
        results = {}, {}
        for case, text in texts.items():
            options = options_of(text)
            if str(n) not in options["ranks"].split(","):
                continue
            for to, found in zip(results, train(case, options, rank, tensors)):
                to.update({f"{case}/{n}/{rank}/{name}": value for name, value in found.items()})
        return results

    return on_ranks((2, 4), on_rank)


respond(train_all)
