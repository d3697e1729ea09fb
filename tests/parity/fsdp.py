"""A transformer trained with PyTorch's fully_shard and FullyShardedDataParallel on two ranks: losses of all steps,
gradients of the first, collectives of the second, parameters of the last. texts["model"] is the model's configuration.
Every other text has the options of a case: "api=fully_shard reshard=1" or "api=fsdp strategy=SHARD_GRAD_OP". tensors:
model/weights/..., and tokens and targets of (ranks, ...)."""
import warnings

import torch
import torch.nn.functional as F
from harness import respond
from models import GPT2Block, LlamaBlock, model_of
from ranks import comm_debug_mode, counts, on_ranks, options_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

warnings.filterwarnings("ignore")
RANKS, STEPS, BLOCKS = 2, 20, (GPT2Block, LlamaBlock)


def wrap(model, options, mesh):
    if options["api"] == "fully_shard":
        for module in [*(m for m in model.modules() if isinstance(m, BLOCKS)), model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=options["reshard"] == "1")
        return model
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[options["strategy"]],
        auto_wrap_policy=ModuleWrapPolicy(set(BLOCKS)),
        use_orig_params=True,
    )


def full_tensors(model, grads):
    """Parameters, or their gradients, by name. FullyShardedDataParallel needs summon_full_params for them."""
    clean = lambda name: name.replace("_fsdp_wrapped_module.", "")
    pick = lambda p: p.grad if grads else p.detach()
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=grads):
            return {clean(name): pick(p).clone() for name, p in model.named_parameters()}
    return {name: pick(p).full_tensor().clone() for name, p in model.named_parameters()}


def train(options, rank, text, tensors):
    out, texts = {}, {}
    model = wrap(model_of(text, "model", tensors), options, init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with comm_debug_mode() as forward:
            loss = F.cross_entropy(model(tensors["tokens"][rank]).flatten(0, 1), tensors["targets"][rank].flatten())
        with comm_debug_mode() as backward:
            loss.backward()
        if step == 1:  # FullyShardedDataParallel records the order in the first step
            texts["forward"], texts["backward"] = counts(forward), counts(backward)
        if step == 0:
            out.update({"grads/" + name: grad for name, grad in full_tensors(model, grads=True).items()})
        optimizer.step()
        losses.append(loss.detach())
    out["losses"] = torch.stack(losses)
    out.update({"parameters/" + name: p for name, p in full_tensors(model, grads=False).items()})
    return out, texts


def train_all(tensors, texts):
    def on_rank(rank, n):
        results = {}, {}
        for case in [name for name in texts if name != "model"]:
            for to, found in zip(results, train(options_of(texts[case]), rank, texts["model"], tensors)):
                to.update({f"{case}/{rank}/{name}": value for name, value in found.items()})
        return results

    return on_ranks((RANKS,), on_rank)


respond(train_all)
