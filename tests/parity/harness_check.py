"""For harness_test.cpp: multiplies a tensor, and returns what it received."""
import os

from harness import respond


def check(tensors, texts):
    dangerous = [name for name in os.environ if name.startswith(("LD_", "TESSERA_", "PYTHON"))]
    out = {"x": tensors["x"] * int(texts["by"]), "flags": tensors["flags"]}
    return out, {"names": " ".join(tensors), "environment": " ".join(dangerous)}


respond(check)
