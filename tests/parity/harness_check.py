"""For harness_test.cpp: multiplies, and says what it sees."""
import os

from harness import answer


def check(tensors, texts):
    dangerous = [name for name in os.environ if name.startswith(("LD_", "TESSERA_", "PYTHON"))]
    out = {"x": tensors["x"] * int(texts["by"]), "flags": tensors["flags"]}
    return out, {"said": " ".join(tensors), "environment": " ".join(dangerous)}


answer(check)
