"""Dumps PyTorch's operator database: python op_db.py FOLDER [samples per entry [samples per other dtype]].

An entry of op_db is often a Python function, so a sample is stored as the ATen program that it runs
(make_fx(pre_dispatch=True)): inputs, ops in order, outputs, and the gradients of the inputs. FOLDER/op_db.json has the
programs, FOLDER/op_db.safetensors the tensors. tests/parity/op_db_test.cpp replays them on distributed tensors.
An entry has samples of its first dtype (float32 if it takes that), and of bfloat16, int64 and complex64 if it takes them.
"""
import contextlib
import enum
import json
import math
import sys
import types
import unittest
import warnings

import torch

if "expecttest" not in sys.modules:
    try:
        import expecttest  # noqa: F401
    except ImportError:  # op_db's module imports it, and uses nothing of it here
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase

from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

FIRST_DTYPES = [torch.float32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
OTHER_DTYPES = [torch.bfloat16, torch.int64, torch.complex64]
STORED = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
          torch.uint8, torch.uint64, torch.bool, torch.complex32, torch.complex64, torch.complex128,
          torch.float8_e4m3fn, torch.float8_e5m2}
MOST_ELEMENTS = 1500  # of one sample, results included; entries without such a sample get one of up to 40,000
MOST_ELEMENTS_OF_OTHER_DTYPES = 400
# CPU kernels run the samples of this entry too, although op_db lists it for CUDA alone.
ALSO_ON_CPU = {"nn.functional.batch_norm.without_cudnn": torch.float32}
SCALAR_TYPES = {torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5,
                torch.float32: 6, torch.float64: 7, torch.complex32: 8, torch.complex64: 9, torch.complex128: 10,
                torch.bool: 11, torch.bfloat16: 15, torch.float8_e5m2: 23, torch.float8_e4m3fn: 24, torch.uint64: 29}
MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2,
                  torch.channels_last_3d: 3}


class Skip(Exception):
    pass


def encode(value, ids):
    """A JSON value for an argument."""
    if isinstance(value, torch.fx.Node):
        return {"v": ids[value]}
    if isinstance(value, (list, tuple)):
        return [encode(v, ids) for v in value]
    if isinstance(value, enum.Enum):
        return encode(value.value, ids)
    if isinstance(value, (bool, int, str, type(None))):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {"int": SCALAR_TYPES[value]}
    if isinstance(value, torch.memory_format):
        return {"int": MEMORY_FORMATS[value]}
    if isinstance(value, torch.layout):
        if value != torch.strided:
            raise Skip("sparse")
        return {"int": 0}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise Skip(f"argument of type {type(value).__name__}")


def to_program(graph_module, tensors):
    """The nodes of a traced function. Node ids: placeholders first."""
    ids, nodes, constants = {}, [], {}
    outputs = None
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            ids[node] = len(ids)
        elif node.op == "get_attr":
            constants[node] = getattr(graph_module, node.target)
        elif node.op == "output":
            outputs = node.args[0]
    inputs = len(ids)
    for node, constant in constants.items():
        ids[node] = len(ids)
        tensors.append(constant.detach())
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        ids[node] = len(ids)
        if node.target is __import__("operator").getitem:
            nodes.append({"op": "getitem", "args": [encode(node.args[0], ids), node.args[1]]})
            continue
        schema = getattr(node.target, "_schema", None)
        if not schema:
            raise Skip(f"calls {node.target}")
        name = schema.name + ("." + schema.overload_name if schema.overload_name else "")
        args = {}
        for i, argument in enumerate(schema.arguments):
            if i < len(node.args):
                args[argument.name] = encode(node.args[i], ids)
            elif argument.name in node.kwargs:
                args[argument.name] = encode(node.kwargs[argument.name], ids)
        nodes.append({"op": name, "args": args})
    flat = [o for o in tree_flatten(outputs)[0] if isinstance(o, torch.fx.Node)]
    return {"constants": len(constants), "inputs": inputs, "nodes": nodes, "outputs": [ids[o] for o in flat]}


# Entries that return a value of the host. They cannot be traced; they are one op each.
HOST_VALUES = {"item": "aten::item", "allclose": "aten::allclose", "equal": "aten::equal"}


def dump_host_value(op, sample, tensors_out):
    schema = torch._C._jit_get_schemas_for_operator(HOST_VALUES[op.name])[0]
    values = [sample.input, *sample.args]
    args, inputs = {}, 0
    for argument, value in zip(schema.arguments, values):
        if isinstance(value, torch.Tensor):
            tensors_out[f"i{inputs}"] = value.detach()
            args[argument.name] = {"v": inputs}
            inputs += 1
        else:
            args[argument.name] = encode(value, {})
    for name, value in sample.kwargs.items():
        args[name] = encode(value, {})
    result = op(sample.input, *sample.args, **sample.kwargs)
    return {"constants": 0, "inputs": inputs, "nodes": [{"op": schema.name, "args": args}], "outputs": [],
            "value": encode(result, {}), "random": False, "makes_tensors": False, "grad": [False] * inputs,
            "has_grad": [False] * inputs}


# Functions that check values on the host before they compute: gaussian_nll_loss raises if any(var < 0). A trace has no
# values. The checks of these samples do not raise, so the condition is False.
CHECKS_VALUES = {"nn.functional.gaussian_nll_loss"}


@contextlib.contextmanager
def conditions_are_false():
    before = torch.Tensor.__bool__
    torch.Tensor.__bool__ = lambda self: False
    try:
        yield
    finally:
        torch.Tensor.__bool__ = before


# Entries that are custom ops with a backward in Python. Their program has forward and backward, as functional ops. The
# gradients are results.
CUSTOM_OPS = {"nn.functional.linear_cross_entropy.chunked", "nn.functional.linear_cross_entropy.chunked_none"}


def custom_op_bodies():
    from torch.nn.modules import linear_cross_entropy as module

    ops = torch.ops.torch_nn
    return {ops._linear_cross_entropy_batch_chunked.default: module._linear_cross_entropy_batch_chunked._init_fn,
            ops._linear_cross_entropy_batch_chunked_no_reduction.default:
                module._linear_cross_entropy_batch_chunked_no_reduction._init_fn}


def with_backward(run, wants):
    def run_both(*tensors):
        leaves = [t.detach().requires_grad_(w) for t, w in zip(tensors, wants)]
        with torch.enable_grad():
            results = run(*leaves)
        through = [r for r in results if r.requires_grad]
        asked = [t for t in leaves if t.requires_grad]
        gradients = torch.autograd.grad(through, asked, [cotangent(r) for r in through])
        return [r.detach() for r in results] + list(gradients)

    return run_both


def trace(run, tensors, name):
    if name in CUSTOM_OPS:
        both = make_fx(run, decomposition_table=custom_op_bodies())(*tensors)
        return make_fx(torch.func.functionalize(both))(*tensors)
    with conditions_are_false() if name in CHECKS_VALUES else contextlib.nullcontext():
        return make_fx(run, pre_dispatch=True)(*tensors)


def cotangent(t):
    n = t.numel()
    return torch.linspace(0.5, 1.5, n, dtype=torch.float64).to(t.dtype).reshape(t.shape)


def dump(op, name, sample, tensors_out, most_elements):
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    given = [leaves[i].detach().clone(memory_format=torch.preserve_format) for i in at]
    if any(t.layout != torch.strided or t.is_quantized or t.dtype not in STORED for t in given):
        raise Skip("sparse, or a dtype that is not stored")
    wants = [leaves[i].requires_grad and (t.is_floating_point() or t.is_complex()) for t, i in zip(given, at)]

    def run(*tensors):
        full = list(leaves)
        for i, t in zip(at, tensors):
            full[i] = t
        input, args, kwargs = tree_unflatten(full, spec)
        result = op(input, *args, **kwargs)
        return [r for r in tree_flatten(result)[0] if isinstance(r, torch.Tensor)]

    if name in CUSTOM_OPS:
        run = with_backward(run, wants)
        wants = [False] * len(wants)
    torch.manual_seed(0)
    traced = trace(run, [t.clone(memory_format=torch.preserve_format) for t in given], name)
    stored = list(given)
    program = to_program(traced, stored)
    random = any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in traced.graph.nodes
                 if n.op == "call_function")
    leaves_again = [t.clone(memory_format=torch.preserve_format).requires_grad_(w) for t, w in zip(given, wants)]
    torch.manual_seed(0)
    results = run(*[t * 1 if w else t.clone() for t, w in zip(leaves_again, wants)])
    if any(r.layout != torch.strided or r.dtype not in STORED for r in results):
        raise Skip("a result that is sparse or of a dtype that is not stored")
    gradients = [None] * len(given)
    through = [r for r in results if r.requires_grad]
    if op.supports_autograd and through and any(wants):
        torch.autograd.backward(through, [cotangent(r) for r in through])
        gradients = [t.grad for t in leaves_again]
    names = [n["op"].split(".")[0] for n in program["nodes"]]
    undefined = any(n in ("aten::empty", "aten::empty_like", "aten::empty_permuted", "aten::empty_strided",
                          "aten::new_empty", "aten::new_empty_strided") for n in names)
    program["random"] = bool(random or (undefined and op.name.startswith(("empty", "new_empty"))))
    # Tensors that the program makes are plain.
    program["makes_tensors"] = any(not any("{'v': " in str(a) for a in n["args"].values()) for n in program["nodes"]
                                   if n["op"] != "getitem")
    program["grad"] = [bool(w) for w in wants]
    elements = sum(t.numel() for t in stored) + sum(r.numel() for r in results)
    if elements > most_elements:
        raise Skip("large")
    for i, t in enumerate(stored):
        tensors_out[f"i{i}"] = t
    for i, r in enumerate(results):
        tensors_out[f"o{i}"] = r.detach()
    for i, g in enumerate(gradients):
        if g is not None:
            tensors_out[f"g{i}"] = g.detach()
    program["has_grad"] = [g is not None for g in gradients]
    return program


def samples_of(op, name, dtype, count, most_elements, most_elements_of_one):
    """Up to `count` programs with their tensors, small ones if there are any, else one that is larger. And why not."""
    why = "no sample"
    grad = op.supports_autograd and (name in ALSO_ON_CPU or dtype in op.supported_backward_dtypes("cpu"))
    for most, wanted in ((most_elements, count), (most_elements_of_one, 1)):
        found = []
        torch.manual_seed(0)
        samples = iter(op.sample_inputs("cpu", dtype, requires_grad=grad))
        try:
            for number, sample in enumerate(samples):
                if len(found) == wanted or number > max(60, 2 * count):
                    break
                tensors = {}
                try:
                    if op.name in HOST_VALUES:
                        program = dump_host_value(op, sample, tensors)
                    else:
                        program = dump(op, name, sample, tensors, most)
                except Exception as e:  # noqa: BLE001
                    why = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:100]
                    continue
                program["name"], program["sample"] = name, number
                found.append((program, tensors))
        except Exception as e:  # noqa: BLE001
            why = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:100]
        finally:
            getattr(samples, "close", lambda: None)()  # a generator that is freed inside of a trace prints an error
        if found:
            return found, ""
    return [], why


class Dump:
    def __init__(self):
        self.programs, self.tensors = [], {}

    def add(self, program, found):
        key = f"{len(self.programs)}"
        self.programs.append(program)
        for k, t in found.items():
            if k[0] == "i" and not t.is_contiguous():
                program.setdefault("strides", {})[k] = list(t.stride())
            t = t.contiguous().resolve_conj().resolve_neg().clone()  # save_file needs contiguous tensors
            self.tensors[f"{key}.{k}" + ("c" if t.is_complex() else "")] = torch.view_as_real(t) if t.is_complex() else t


def main():
    from safetensors.torch import save_file

    folder, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2
    other_count = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    only = sys.argv[4:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out, skipped = Dump(), {}
    for op in op_db:
        name = op.name + ("." + op.variant_test_name if op.variant_test_name else "")
        if only and name not in only:
            continue
        first = next((d for d in FIRST_DTYPES if op.supports_dtype(d, "cpu")), ALSO_ON_CPU.get(name))
        if not first:
            skipped[name] = "no dtype on CPU"
            continue
        found, why = samples_of(op, name, first, count, MOST_ELEMENTS, 40000)
        if not found:
            skipped[name] = why
        for other in OTHER_DTYPES:
            if found and other != first and op.supports_dtype(other, "cpu"):
                more, _ = samples_of(op, name, other, other_count, MOST_ELEMENTS_OF_OTHER_DTYPES, MOST_ELEMENTS)
                for program, _ in more:
                    program["other_dtype"] = str(other).removeprefix("torch.")
                found += more
        for program, tensors in found:
            out.add(program, tensors)
    save_file(out.tensors, f"{folder}/op_db.safetensors")
    with open(f"{folder}/op_db.json", "w") as f:
        json.dump({"torch": torch.__version__, "entries": len(op_db), "skipped": skipped, "programs": out.programs}, f,
                  separators=(",", ":"))
    print(f"{len(op_db)} entries, {len(out.programs)} programs, {len(skipped)} entries skipped")
    for name, why in skipped.items():
        print(f"  {name}: {why}")


if __name__ == "__main__":
    main()
