"""GPT-2 and Llama trained under PyTorch's own parallelize_module, with the plans that tessera/models/plans.cpp has:
losses of all steps, gradients and collectives of the first. For each case "name": texts[name] says which model,
texts[name/steps/n] how long on n ranks; tensors name/weights/..., name/tokens, name/targets."""
import multiprocessing
import os
import sys
import tempfile
import types
from datetime import timedelta

import torch
import torch.distributed as dist
from harness import answer
from models import loss_of, model_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

try:
    from torch.distributed.tensor.debug import CommDebugMode
except ModuleNotFoundError:  # numpy: a neighbour of CommDebugMode draws with it
    sys.modules["numpy"] = types.ModuleType("numpy")
    from torch.distributed.tensor.debug import CommDebugMode

    del sys.modules["numpy"]


def rowwise(sequence, **layouts):
    output = Shard(1) if sequence else Replicate()
    return RowwiseParallel(**{"output_layouts": output, "use_local_output": not sequence, **layouts})


def gather_input(sequence, inputs=1):
    layouts = [Shard(1) if sequence else Replicate(), Replicate()]
    given, wanted = ((layout,) + (None,) * (inputs - 1) for layout in layouts)
    return {"input_layouts": given, "desired_input_layouts": wanted}


def gpt2_plan(sequence):
    plan = {
        "wte": rowwise(sequence, input_layouts=Replicate()),
        "h.*.attn.c_attn": ColwiseParallel(),
        "h.*.attn.c_proj": rowwise(sequence),
        "h.*.mlp.c_fc": ColwiseParallel(),
        "h.*.mlp.c_proj": rowwise(sequence),
        "lm_head": PrepareModuleInputOutput(
            **gather_input(sequence, inputs=2), output_layouts=Shard(-1), desired_output_layouts=Replicate()
        ),
    }
    if sequence:
        plan["wpe"] = rowwise(sequence, input_layouts=Replicate(), output_layouts=Shard(0))
        for norm in ["h.*.ln_1", "h.*.ln_2", "ln_f"]:
            plan[norm] = SequenceParallel()
        for part in ["h.*.attn", "h.*.mlp"]:
            plan[part] = PrepareModuleInput(**gather_input(sequence))
    return plan


def llama_plan(sequence):
    plan = {
        "tok_embeddings": rowwise(sequence, input_layouts=Replicate()),
        "layers.*.attention": PrepareModuleInput(**gather_input(sequence)),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": rowwise(sequence),
        "layers.*.feed_forward": PrepareModuleInput(**gather_input(sequence)),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": rowwise(sequence),
        "output": ColwiseParallel(
            input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate()
        ),
    }
    if sequence:
        for norm in ["layers.*.attention_norm", "layers.*.ffn_norm", "norm"]:
            plan[norm] = SequenceParallel()
    return plan


# parallelize_module cuts c_attn into n equal runs of rows. So that a rank gets its heads of q, k and v, the rows are put
# in another order first: (3, n, rows) -> (n, 3, rows).
def by_rank(t, n):
    return t.unflatten(0, (3, n, -1)).transpose(0, 1).flatten(0, 2)


def by_section(t, n):
    return t.unflatten(0, (n, 3, -1)).transpose(0, 1).flatten(0, 2)


def counts(mode):
    return " ".join(f"{str(op).split('.')[-1]}={count}" for op, count in mode.get_comm_counts().items())


def train(case, text, sequence, n, steps, tensors):
    out, said = {}, {}
    model = model_of(text, case, tensors)
    fused = [name for name, _ in model.named_parameters() if ".c_attn." in name]
    if n > 1:
        with torch.no_grad():
            for name in fused:
                p = model.get_parameter(name)
                p.copy_(by_rank(p, n))
        plan = gpt2_plan(sequence) if text.startswith("GPT2") else llama_plan(sequence)
        parallelize_module(model, init_device_mesh("cpu", (n,)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5, weight_decay=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if step == 0:
            with CommDebugMode() as forward:
                loss = loss_of(model, case, tensors)[1]
            with CommDebugMode() as backward:
                loss.backward()
            said["forward"], said["backward"] = counts(forward), counts(backward)
            for name, p in model.named_parameters():
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                out["grads/" + name] = (by_section(grad, n) if n > 1 and name in fused else grad).clone()
            with CommDebugMode() as update:
                optimizer.step()
            said["optimizer"] = counts(update)
        else:
            loss = loss_of(model, case, tensors)[1]
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    out["losses"] = torch.stack(losses)
    return out, said


def train_all(rank, n, folder, tensors, texts):
    torch.set_num_threads(1)
    if n > 1:
        store = dist.FileStore(f"{folder}/store{n}", n)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=60))
    answers = {}, {}
    for case in [name for name in texts if "/" not in name]:
        steps = int(texts[f"{case}/steps/{n}"])
        for sequence in [False, True] if n > 1 else [False]:
            for to, what in zip(answers, train(case, texts[case], sequence, n, steps, tensors)):
                to.update({f"{case}/{n}/{int(sequence)}/{name}": value for name, value in what.items()})
    if rank == 0:
        torch.save(answers, f"{folder}/answers{n}")
    if n > 1:
        dist.barrier()
        dist.destroy_process_group()


# Forked, not started anew: importing torch would take each of them seconds.
def on_ranks(n, folder, tensors, texts):
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=train_all, args=(rank, n, folder, tensors, texts), daemon=True) for rank in range(n)
    ]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join()
        if p.exitcode != 0:
            sys.exit(f"a rank of {n} ended with {p.exitcode}")
    return torch.load(f"{folder}/answers{n}", weights_only=False)


def train_on_worlds(tensors, texts):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    out, said = {}, {}
    with tempfile.TemporaryDirectory(dir=os.path.dirname(sys.argv[2])) as folder:
        for n in sorted({int(name.split("/")[2]) for name in texts if "/" in name}):
            tensors_of_n, texts_of_n = on_ranks(n, folder, tensors, texts)
            out.update(tensors_of_n)
            said.update(texts_of_n)
    return out, said


answer(train_on_worlds)
