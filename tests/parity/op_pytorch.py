"""Counts the entries of op_db that PyTorch's own DTensor passes: python op_pytorch.py FOLDER [entries].

The conditions are those of PyTorch's test of DTensor (test/distributed/tensor/test_dtensor_ops.py): float32, or the first
dtype of an entry that does not take it; sizes that a world of four divides; each combination of Replicate and Shard of
the inputs, at most 24 per sample; results are compared. Gradients are compared, too: that test ignores them. As in
op_db_test.cpp, random entries are compared by size, and entries without tensors pass. FOLDER is a dump of op_db.py;
FOLDER/op_pytorch.json gets the counts and, for each other entry, the reason.
"""
import itertools
import json
import sys
import warnings

import torch
import torch.distributed as dist
from in_child import in_child
from op_db import ALSO_ON_CPU, FIRST_DTYPES, STORED, cotangent
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal import common_methods_invocations as database
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

WORLD, MOST_COMBINATIONS = 4, 24
database.L, database.M, database.S, database.XS = 24, 12, 4, 2


def choices_of(t):
    sharded = [Shard(d) for d, n in enumerate(t.shape) if n > 1 and n % WORLD == 0]
    return [Replicate(), *(sharded if t.dtype != torch.bool else [])]


def tensors_of(value):
    return [r for r in tree_leaves(value) if isinstance(r, torch.Tensor)]


def full(t):
    t = t.full_tensor() if isinstance(t, DTensor) else t
    return t.reconcile() if isinstance(t, LocalTensor) else t


def check(found, expected, same_sizes, what):
    for x, y in zip(found, expected, strict=True):
        if x is None or y is None:
            assert x is y, f"{what}: none"
        elif same_sizes:
            assert x.shape == y.shape, f"{what}: another size"
        else:
            torch.testing.assert_close(full(x).detach(), y.detach(), rtol=5e-4, atol=2e-4, equal_nan=True)


def gradients(results, leaves):
    through = [r for r in results if r.requires_grad]
    asked = [t for t in leaves if t.requires_grad]
    if not through or not asked:
        return []
    return torch.autograd.grad(through, asked, [cotangent(r) for r in through], allow_unused=True)


def run_sample(op, sample, mesh, same_sizes):
    """Raises where the results differ. Returns why the gradients do, or ""."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    wants = [leaves[i].requires_grad for i in at]

    def run(tensors):
        values = list(leaves)
        for i, t in zip(at, tensors, strict=True):
            values[i] = t
        input, args, kwargs = tree_unflatten(values, spec)
        return tensors_of(op.op(input, *args, **kwargs))

    given = [leaves[i].detach() for i in at]
    dense = [t.clone().requires_grad_(w) for t, w in zip(given, wants, strict=True)]
    expected = run(dense)
    expected_gradients = gradients(expected, dense) if not same_sizes else []
    why = ""
    for placements in itertools.islice(itertools.product(*map(choices_of, given)), MOST_COMBINATIONS):
        with LocalTensorMode(frozenset(range(WORLD))):
            values = [distribute_tensor(t.clone(), mesh, [p]).detach().requires_grad_(w)
                      for t, p, w in zip(given, placements, wants, strict=True)]
            found = run(values)
            if any(r.numel() == 0 for r in found):
                continue
            check(found, expected, same_sizes, f"{placements}")
            if why or not expected_gradients:
                continue
            try:
                through = [r for r in found if r.requires_grad]
                asked = [v for v in values if v.requires_grad]
                seeds = [cotangent(e.detach()) for e in expected if e.requires_grad]
                seeds = [distribute_tensor(s, mesh, [Replicate()]) if isinstance(r, DTensor) else s
                         for r, s in zip(through, seeds, strict=True)]
                check(torch.autograd.grad(through, asked, seeds, allow_unused=True), expected_gradients, False, "gradient")
            except Exception as e:  # noqa: BLE001
                why = text_of(e)
    return why


def text_of(e):
    return f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0]}"[:200]


def run_entry(op, name, mesh, random):
    """Why the entry fails, and why its gradients do."""
    dtype = next((d for d in FIRST_DTYPES if op.supports_dtype(d, "cpu")), ALSO_ON_CPU.get(name))
    if not dtype:
        return "no dtype on CPU", ""
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    why = ""
    try:
        torch.manual_seed(0)
        for sample in op.sample_inputs("cpu", dtype, requires_grad=grad):
            values = tensors_of((sample.input, sample.args, sample.kwargs))
            if any(t.layout != torch.strided or t.dtype not in STORED for t in values):
                return "sparse", ""
            why = run_sample(op, sample, mesh, random) or why
    except Exception as e:  # noqa: BLE001
        return text_of(e), ""
    return "", why


def main():
    folder, only = sys.argv[1], sys.argv[2:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=WORLD)
    with LocalTensorMode(frozenset(range(WORLD))):
        mesh = init_device_mesh("cpu", (WORLD,))
    programs = json.load(open(f"{folder}/op_db.json"))["programs"]
    random = {p["name"] for p in programs if p["random"]}
    fails, fails_gradients, count = {}, {}, 0
    run_entry(next(op for op in database.op_db if op.name == "addmm"), "", mesh, False)  # loads what each child needs
    for op in database.op_db:
        name = op.name + ("." + op.variant_test_name if op.variant_test_name else "")
        if only and name not in only:
            continue
        count += 1
        result = in_child(lambda op=op, name=name: run_entry(op, name, mesh, name in random))
        why, why_gradients = result or ("the process ended", "")
        if why:
            fails[name] = why
        elif why_gradients:
            fails_gradients[name] = why_gradients
        if count % 50 == 0:
            print(f"{count}: {count - len(fails)} pass", flush=True)
    passes = count - len(fails)
    with open(f"{folder}/op_pytorch.json", "w") as f:
        json.dump({"torch": torch.__version__, "world": WORLD, "entries": count, "pass": passes,
                   "pass_with_gradients": passes - len(fails_gradients), "fails": fails,
                   "fails_gradients": fails_gradients}, f, indent=0)
    print(f"{count} entries: PyTorch's DTensor passes {passes}, with gradients {passes - len(fails_gradients)}")


if __name__ == "__main__":
    main()
