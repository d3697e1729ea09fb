"""Checkpoints of Tessera and of Python (packages safetensors and torch.distributed.checkpoint).

texts["ours"] is a folder that Tessera saved. Its tensors are returned twice: safetensors/... as read with safetensors
and assembled from the offsets, and dcp/... as read with torch.distributed.checkpoint.load. texts["ours_distcp"] is the
same as .distcp files; distcp/... are its tensors as dcp.load reads them, texts["values"] its other values.
texts["theirs"] is an empty folder. The tensors theirs/... are written there in five forms."""
import glob
import importlib.util
import json
import os
import warnings
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from harness import respond

try:
    import safetensors.torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
except ImportError as error:
    missing = str(error)
else:
    missing = ""


warnings.filterwarnings("ignore")


def without_numpy():
    """safetensors uses numpy only for the address and the length of a tensor."""
    address = lambda t: SimpleNamespace(ctypes=SimpleNamespace(data=t.data_ptr()), nbytes=t.nbytes)
    safetensors.torch._to_ndarray = lambda tensor: (address(tensor), tensor)


def read_with_safetensors(folder):
    shards = {}
    for path in glob.glob(folder + "/*.safetensors"):
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():
                shards.setdefault(name, []).append((offsets[name]["saved_offsets"], file.get_tensor(name)))
    full = {}
    for name, parts in shards.items():
        sizes = [max(o[d] + t.shape[d] for o, t in parts) for d in range(parts[0][1].dim())]
        full[name] = torch.zeros(sizes, dtype=parts[0][1].dtype)
        for offset, tensor in parts:
            full[name][tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape))] = tensor
    return full


def read_with_dcp(folder, like):
    dict_ = {name: torch.zeros_like(t) for name, t in like.items()}
    dcp.load(dict_, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    return dict_


def write_all(folder, tensors):
    names = sorted(tensors)
    os.makedirs(folder + "/index")
    for i, part in enumerate((names[:1], names[1:]), 1):
        save_file({name: tensors[name] for name in part}, f"{folder}/index/model-{i:05}-of-00002.safetensors")
    weights = {name: f"model-{1 if name in names[:1] else 2:05}-of-00002.safetensors" for name in names}
    with open(folder + "/index/model.safetensors.index.json", "w") as file:
        json.dump({"metadata": {"total_size": 0}, "weight_map": weights}, file, indent=2)
    save_file(tensors, folder + "/one.safetensors", metadata={"format": "pt"})
    dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(folder + "/consolidated"), no_dist=True)
    dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(folder + "/shards", save_distributed=True), no_dist=True)
    # Tensors that share a storage, and one that is not contiguous, beside objects.
    dcp.save({**tensors, "view": torch.arange(12.0).view(3, 4)[:, 1:3], "step": 7, "lr": 0.5, "note": "text",
              "other": {"a": [1, 2]}}, checkpoint_id=folder + "/distcp", no_dist=True)


def read_distcp(folder, like):
    """The tensors as dcp.load reads them, and the objects."""
    dict_ = {name: torch.zeros_like(t) for name, t in like.items()}
    objects = {"step": None, "note": None, "lr": None}
    loaded = dict_ | objects
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    return {name: loaded[name] for name in dict_}, {name: loaded[name] for name in objects}


def both_ways(tensors, texts):
    if missing:
        return {}, {"skipped": missing}
    if not importlib.util.find_spec("numpy"):
        without_numpy()
    theirs = {name[len("theirs/"):]: t for name, t in tensors.items() if name.startswith("theirs/")}
    write_all(texts["theirs"], theirs)
    read = read_with_safetensors(texts["ours"])
    out = {"safetensors/" + name: t for name, t in read.items()}
    out.update({"dcp/" + name: t for name, t in read_with_dcp(texts["ours"], read).items()})
    distcp, values = read_distcp(texts["ours_distcp"], read)
    out.update({"distcp/" + name: t for name, t in distcp.items()})
    return out, {"values": repr(values)}


respond(both_ways)
