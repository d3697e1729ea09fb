"""A transformer trained under PyTorch's fully_shard and FullyShardedDataParallel on two ranks: losses of all steps,
gradients and collectives of the first, parameters of the last. texts["model"] says which model, every other text is a
case: texts[name] = "api=fully_shard reshard=1" or "api=fsdp strategy=SHARD_GRAD_OP". tensors model/weights/..., and
tokens and targets of (ranks, ...)."""
import multiprocessing
import os
import sys
import tempfile
import types
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import answer
from models import GPT2Block, LlamaBlock, model_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

try:
    from torch.distributed.tensor.debug import CommDebugMode
except ModuleNotFoundError:  # numpy: a neighbour of CommDebugMode draws with it
    sys.modules["numpy"] = types.ModuleType("numpy")
    from torch.distributed.tensor.debug import CommDebugMode

    del sys.modules["numpy"]

warnings.filterwarnings("ignore")
RANKS, STEPS, BLOCKS = 2, 20, (GPT2Block, LlamaBlock)


def wrap(model, row, mesh):
    if row["api"] == "fully_shard":
        for module in [*(m for m in model.modules() if isinstance(m, BLOCKS)), model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=row["reshard"] == "1")
        return model
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[row["strategy"]],
        auto_wrap_policy=ModuleWrapPolicy(set(BLOCKS)),
        use_orig_params=True,
    )


def whole(model, grads):
    """Parameters, or their gradients, by name. FullyShardedDataParallel shows them whole inside of a context only."""
    clean = lambda name: name.replace("_fsdp_wrapped_module.", "")
    pick = lambda p: p.grad if grads else p.detach()
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=grads):
            return {clean(name): pick(p).clone() for name, p in model.named_parameters()}
    return {name: pick(p).full_tensor().clone() for name, p in model.named_parameters()}


def counts(mode):
    return " ".join(f"{str(op).split('.')[-1]}={count}" for op, count in mode.get_comm_counts().items())


def train(row, rank, text, tensors):
    out, said = {}, {}
    model = wrap(model_of(text, "model", tensors), row, init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with CommDebugMode() as forward:
            loss = F.cross_entropy(model(tensors["tokens"][rank]).flatten(0, 1), tensors["targets"][rank].flatten())
        with CommDebugMode() as backward:
            loss.backward()
        if step == 1:  # FullyShardedDataParallel learns the order in the first
            said["forward"], said["backward"] = counts(forward), counts(backward)
        if step == 0:
            out.update({"grads/" + name: grad for name, grad in whole(model, grads=True).items()})
        optimizer.step()
        losses.append(loss.detach())
    out["losses"] = torch.stack(losses)
    out.update({"parameters/" + name: p for name, p in whole(model, grads=False).items()})
    return out, said


def train_all(rank, folder, tensors, texts):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    answers = {}, {}
    for case in [name for name in texts if name != "model"]:
        row = dict(word.split("=", 1) for word in texts[case].split())
        for to, what in zip(answers, train(row, rank, texts["model"], tensors)):
            to.update({f"{case}/{rank}/{name}": value for name, value in what.items()})
    torch.save(answers, f"{folder}/answers.{rank}")
    dist.barrier()
    dist.destroy_process_group()


# Forked, not started anew: importing torch would take each of them seconds.
def train_on_ranks(tensors, texts):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("fork")
    out, said = {}, {}
    with tempfile.TemporaryDirectory(dir=os.path.dirname(sys.argv[2])) as folder:
        ranks = [
            context.Process(target=train_all, args=(rank, folder, tensors, texts), daemon=True)
            for rank in range(RANKS)
        ]
        for p in ranks:
            p.start()
        for rank, p in enumerate(ranks):
            p.join()
            if p.exitcode != 0:
                sys.exit(f"rank {rank} ended with {p.exitcode}")
            for to, what in zip((out, said), torch.load(f"{folder}/answers.{rank}", weights_only=False)):
                to.update(what)
    return out, said


answer(train_on_ranks)
