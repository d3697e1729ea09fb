"""GPT-2 and Llama trained with PyTorch's parallelize_module and the plans of tessera/models/plans.cpp: losses of all
steps, gradients and collectives of the first. For each case "name": texts[name] is the model's configuration,
texts[name/steps/n] the number of steps on n ranks; tensors name/weights/..., name/tokens, name/targets."""
import torch
from harness import respond
from models import loss_of, model_of
from ranks import comm_debug_mode, counts, on_ranks
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


# parallelize_module shards c_attn into n equal ranges of rows. Each rank needs its heads of q, k and v, so the rows are
# reordered first: (3, n, rows) -> (n, 3, rows).
def by_rank(t, n):
    return t.unflatten(0, (3, n, -1)).transpose(0, 1).flatten(0, 2)


def by_section(t, n):
    return t.unflatten(0, (n, 3, -1)).transpose(0, 1).flatten(0, 2)


def train(case, text, sequence, n, steps, tensors):
    out, counted = {}, {}
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
            with comm_debug_mode() as forward:
                loss = loss_of(model, case, tensors)[1]
            with comm_debug_mode() as backward:
                loss.backward()
            counted["forward"], counted["backward"] = counts(forward), counts(backward)
            for name, p in model.named_parameters():
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                out["grads/" + name] = (by_section(grad, n) if n > 1 and name in fused else grad).clone()
            with comm_debug_mode() as update:
                optimizer.step()
            counted["optimizer"] = counts(update)
        else:
            loss = loss_of(model, case, tensors)[1]
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    out["losses"] = torch.stack(losses)
    return out, counted


def train_all(tensors, texts):
    def on_rank(rank, n):
        results = {}, {}
        for case in [name for name in texts if "/" not in name]:
            steps = int(texts[f"{case}/steps/{n}"])
            for sequence in [False, True] if n > 1 else [False]:
                for to, found in zip(results, train(case, texts[case], sequence, n, steps, tensors)):
                    to.update({f"{case}/{n}/{int(sequence)}/{name}": value for name, value in found.items()})
        return results if rank == 0 else ({}, {})

    return on_ranks(sorted({int(name.split("/")[2]) for name in texts if "/" in name}), on_rank)


respond(train_all)
