"""The Python end of tests/parity/ask_python.h:  answer(f) runs f(tensors, texts), which gives (tensors, texts) back."""
import sys

import torch


def answer(function):
    if any("tessera" in line for line in open("/proc/self/maps")):
        sys.exit("libtessera is in this process: it would not be PyTorch alone that answers")
    torch.set_num_threads(1)
    tensors, texts = torch.load(sys.argv[1], weights_only=False)
    tensors, texts = function(dict(tensors), dict(texts))
    torch.save((tensors, texts), sys.argv[2])
