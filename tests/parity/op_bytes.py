"""Counts the bytes that PyTorch's DTensor moves for the programs of op_db: python op_bytes.py FOLDER.

FOLDER is a dump of op_db.py. Its first sample of each entry runs on DTensors of a fake world of four ranks, with one
input sharded or partial and the others replicated, and with all inputs sharded. FOLDER/op_bytes.json gets, for each
program, the placements of the inputs, the bytes that the redistributions of the forward move per rank, and those to make
the results replicated after it; "error" where PyTorch raises, "wrong" where the results, or written inputs, of four
simulated ranks are not those of plain tensors, or where nothing was moved and those of this rank are not its part. This
rank is the last one: its shards are the smallest.
tests/parity/op_bytes_test.cpp counts the same for Tessera.
"""
import json
import sys
import warnings

import torch
import torch.distributed as dist
from in_child import in_child
from safetensors import safe_open
from torch.distributed._local_tensor import LocalTensorMode, rank_map
from torch.distributed.tensor import (DTensor, Partial, Replicate, Shard, _dispatch, _redistribute, _tp_conv,
                                      init_device_mesh)
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD, RANK = 4, 3
moved = 0


def bytes_of(source, target, elements, size):
    """Bytes that leave a rank when one axis is redistributed; the same formula is in op_bytes_test.cpp."""
    n, total = WORLD, elements * size
    if source == target or source.is_replicate():
        return 0
    if source.is_partial():
        return (2 if target.is_replicate() else 1) * total * (n - 1) // n
    if target.is_replicate() or target.is_partial():
        return total * (n - 1) // n
    return total * (n - 1) // n // n


original = _redistribute.redistribute_local_tensor


def counted(local, current, target, *args, **kwargs):
    global moved
    moved += bytes_of(current.placements[0], target.placements[0], target.tensor_meta.shape.numel(), local.element_size())
    return original(local, current, target, *args, **kwargs)


_redistribute.redistribute_local_tensor = counted
_dispatch.redistribute_local_tensor = counted
send_neighbours = _tp_conv._ring_send_recv_construct


def counted_neighbours(local, left, right, *args):
    """A convolution sends the edges of its input to the neighbours."""
    global moved
    moved += local[..., :1].numel() * (left + right) * local.element_size()
    return send_neighbours(local, left, right, *args)


_tp_conv._ring_send_recv_construct = counted_neighbours


def bytes_to_replicate(result):
    if not isinstance(result, DTensor):
        return 0
    return bytes_of(result.placements[0], Replicate(), result.numel(), result.element_size())


def is_wrong(found, dense):
    """Whether the local tensor of this rank is not its part of `dense`. A partial value cannot tell."""
    if not isinstance(found, DTensor) or found.placements[0].is_partial():
        return False
    placement, local, part = found.placements[0], found.to_local(), dense
    if placement.is_shard():
        chunks = dense.chunk(WORLD, placement.dim)
        part = chunks[RANK] if RANK < len(chunks) else dense.narrow(placement.dim, 0, 0)
    return local.shape != part.shape or not torch.allclose(local, part, equal_nan=True)


def wrong_cases(ranks, mesh, program, tensors, dense, cases):
    """Which cases have other values than plain tensors, on four ranks that PyTorch simulates."""
    wrong = []
    for case in cases:
        try:
            with torch.no_grad(), implicit_replication(), ranks:
                given = [t.clone(memory_format=torch.preserve_format) for t in tensors]
                values = run(program, [place(t, p, mesh, ranks=True) for t, p in zip(given, case, strict=True)])
                wrong.append(any(differs(values[i], dense[i]) for i in [*program["outputs"], *range(len(tensors))]))
        except Exception:  # noqa: BLE001
            wrong.append(False)  # the simulation does not run it
    return wrong


def differs(found, dense):
    if not isinstance(found, DTensor):
        return False
    full = found.full_tensor().reconcile()
    return full.shape != dense.shape or not torch.allclose(full, dense, rtol=5e-4, atol=2e-4, equal_nan=True)


def decode(value, values):
    if isinstance(value, list):
        return [decode(v, values) for v in value]
    if not isinstance(value, dict):
        return value
    if "v" in value:
        return values[value["v"]]
    if "float" in value:
        return float(value["float"])
    if "complex" in value:
        return complex(*value["complex"])
    if "device" in value:
        return torch.device(value["device"])
    return value["int"]


DTYPES = {0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
          7: torch.float64, 8: torch.complex32, 9: torch.complex64, 10: torch.complex128, 11: torch.bool,
          15: torch.bfloat16}
FORMATS = {0: torch.contiguous_format, 1: torch.preserve_format, 2: torch.channels_last, 3: torch.channels_last_3d}


def run(program, values):
    values = list(values)
    for node in program["nodes"]:
        if node["op"] == "getitem":
            values.append(values[node["args"][0]["v"]][node["args"][1]])
            continue
        name = node["op"].split("::")[1]
        name, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        kwargs = {}
        for argument in op._schema.arguments:
            given = node["args"].get(argument.name)
            if argument.name in node["args"]:
                kwargs[argument.name] = decode(given, values)
            if isinstance(given, dict) and "int" in given:
                kinds = DTYPES if "dtype" in argument.name else FORMATS if "format" in argument.name else {0: torch.strided}
                kwargs[argument.name] = kinds[given["int"]]
        values.append(op(**kwargs))
    return values


def cases_of(tensors):
    """Placements of the inputs: one sharded or partial, the others replicated; then all sharded along one dim."""
    found = []
    for i, t in enumerate(tensors):
        for d in range(min(t.dim(), 3)):
            found.append([f"S({d})" if j == i else "R" for j in range(len(tensors))])
        if t.is_floating_point() and t.dim() > 0:
            found.append(["P" if j == i else "R" for j in range(len(tensors))])
    for d in (0, 1):
        found.append([f"S({d})" if t.dim() > d else "R" for t in tensors])
    unique = []
    for case in found:
        if case not in unique and any(p != "R" for p in case):
            unique.append(case)
    return unique


def place(t, placement, mesh, ranks=False):
    if placement == "P":
        part = t / WORLD  # the sum over the ranks is t
        return DTensor.from_local(rank_map(lambda _: part) if ranks else part, mesh, [Partial()], run_check=False)
    where = Replicate() if placement == "R" else Shard(int(placement[2:-1]))
    return dist.tensor.distribute_tensor(t, mesh, [where], src_data_rank=None)


def main():
    global moved
    folder = sys.argv[1]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    mesh = init_device_mesh("cpu", (WORLD,))
    programs = json.load(open(f"{folder}/op_db.json"))["programs"]
    file = safe_open(f"{folder}/op_db.safetensors", "pt")
    keys = set(file.keys())
    result, checks, seen, errors, wrong = [], [], set(), 0, 0
    for number, program in enumerate(programs):
        if program["name"] in seen or "other_dtype" in program or "value" in program or program["random"]:
            continue
        seen.add(program["name"])
        names = [f"{number}.i{i}" for i in range(program["inputs"] + program["constants"])]
        tensors = [file.get_tensor(n) if n in keys else torch.view_as_complex(file.get_tensor(n + "c")) for n in names]
        for i, t in enumerate(tensors):
            strides = program.get("strides", {}).get(f"i{i}")
            if strides:
                tensors[i] = torch.empty_strided(t.shape, strides, dtype=t.dtype).copy_(t)
        counts = []
        with torch.no_grad():
            dense = run(program, [t.clone(memory_format=torch.preserve_format) for t in tensors])  # and written inputs
        cases = [case + ["R"] * program["constants"] for case in cases_of(tensors[:program["inputs"]])]
        for case in cases:
            try:
                with torch.no_grad(), implicit_replication():
                    given = [t.clone(memory_format=torch.preserve_format) for t in tensors]
                    values = [place(t, p, mesh) for t, p in zip(given, case)]
                    moved = 0
                    values = run(program, values)
                    bytes_moved, results = moved, [values[o] for o in program["outputs"]]
                    checked = [*program["outputs"], *range(len(tensors))]
                    if moved == 0 and any(is_wrong(values[i], dense[i]) for i in checked):
                        wrong += 1
                        counts.append([case, "wrong"])
                    else:
                        counts.append([case, bytes_moved, sum(bytes_to_replicate(r) for r in results)])
            except Exception:  # noqa: BLE001
                errors += 1
                counts.append([case, "error"])
        result.append({"program": number, "name": program["name"], "cases": counts})
        checks.append((program, tensors, dense, cases))
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=WORLD)
    ranks = LocalTensorMode(frozenset(range(WORLD)))
    with ranks:
        mesh = init_device_mesh("cpu", (WORLD,))
    wrong_cases(ranks, mesh, *checks[0])  # loads in this process what each child needs
    for entry, check in zip(result, checks, strict=True):
        simulated = in_child(lambda: wrong_cases(ranks, mesh, *check)) or []  # noqa: B023
        for count, is_wrong_there in zip(entry["cases"], simulated, strict=False):
            if is_wrong_there and count[1] not in ("error", "wrong"):
                wrong += 1
                count[1:] = ["wrong"]
    with open(f"{folder}/op_bytes.json", "w") as f:
        json.dump({"torch": torch.__version__, "world": WORLD, "programs": result}, f, separators=(",", ":"))
    total = sum(len(p["cases"]) for p in result)
    print(f"{len(result)} programs, {total} cases; PyTorch raises in {errors}, and is wrong in {wrong}")


if __name__ == "__main__":
    main()
