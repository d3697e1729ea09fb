"""For optim_test.cpp: the same optimizers on the same parameters and gradients, five steps each."""
import json

import torch
from harness import respond

KINDS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW,
         "RMSprop": torch.optim.RMSprop, "Adagrad": torch.optim.Adagrad}


def parameters(tensors, prefix, dtype):
    names = sorted(name for name in tensors if name.startswith(prefix))
    return [torch.nn.Parameter(tensors[name].to(dtype, copy=True)) for name in names]


def optimizers(tensors, cases, out):
    for name, case in cases.items():
        dtype = getattr(torch, case.pop("dtype", "float32"))
        params = parameters(tensors, "p", dtype)
        options = {key: value for key, value in case.items() if key not in ("kind", "tensor_lr")}
        if case.get("tensor_lr"):
            options["lr"] = torch.tensor(options["lr"])
        half = len(params) // 2
        groups = [{"params": params[:half]}, {"params": params[half:], "lr": options["lr"] * 2}]
        optimizer = KINDS[case["kind"]](groups, **options)
        for step in range(5):
            for i, p in enumerate(params):
                # The last parameter has no gradient in the first two steps.
                no_grad = i == len(params) - 1 and step < 2 and not (case["kind"] == "SGD" and case.get("fused"))
                p.grad = None if no_grad else tensors[f"g{step}.{i}"].to(dtype, copy=True)
            optimizer.step()
        for i, p in enumerate(params):
            out[f"{name}.{i}"] = p.detach()
            for entry, value in optimizer.state[p].items():
                if value is not None:
                    out[f"{name}.{i}.{entry}"] = value


def clipping(tensors, norms, out):
    for norm in norms:
        params = parameters(tensors, "p", torch.float32)
        for i, p in enumerate(params):
            p.grad = tensors[f"g0.{i}"].clone()
        out[f"norm {norm}"] = torch.nn.utils.clip_grad_norm_(params, 0.5, float(norm))
        for i, p in enumerate(params):
            out[f"norm {norm}.{i}"] = p.grad.clone()
    torch.nn.utils.clip_grad_value_(params, 0.01)
    for i, p in enumerate(params):
        out[f"value.{i}"] = p.grad


def schedulers(out):
    lr = torch.optim.lr_scheduler

    def sequential(o):
        return lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=7), lr.CosineAnnealingLR(o, 20, 0.01),
                                   lr.ExponentialLR(o, 0.9)], [7, 30])

    makers = {
        "StepLR": lambda o: lr.StepLR(o, 7, 0.3),
        "MultiStepLR": lambda o: lr.MultiStepLR(o, [3, 20, 20, 41], 0.7),
        "ConstantLR": lambda o: lr.ConstantLR(o, 0.25, 9),
        "LinearLR": lambda o: lr.LinearLR(o, 0.1, 0.9, 13),
        "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.93),
        "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 20, 0.003),
        "LambdaLR": lambda o: lr.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
        "SequentialLR": sequential,
    }
    for name, make in makers.items():
        p, q = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([{"params": [p]}, {"params": [q], "lr": 0.3}], lr=0.1)
        scheduler = make(optimizer)
        seen = []
        for _ in range(50):
            seen.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        out[name] = torch.tensor(seen, dtype=torch.float64)


def optim(tensors, texts):
    out = {}
    optimizers(tensors, json.loads(texts["cases"]), out)
    clipping(tensors, json.loads(texts["norms"]), out)
    schedulers(out)
    return out, {}


respond(optim)
