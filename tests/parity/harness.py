"""The Python side of tests/parity/run_python.h: respond(f) calls f(tensors, texts) and returns its (tensors, texts)."""
import sys

import torch


def respond(function):
    if any("tessera" in line for line in open("/proc/self/maps")):
        sys.exit("libtessera is loaded in this process, but the reference must be PyTorch alone")
    torch.set_num_threads(1)
    tensors, texts = torch.load(sys.argv[1], weights_only=False)
    tensors, texts = function(dict(tensors), dict(texts))
    torch.save((tensors, texts), sys.argv[2])
