"""The program `tessera` in a wheel. Without a Python API: main() starts the program with the LibTorch of the installed
torch, and the program replaces this process."""
import importlib.metadata
import importlib.util
import os
import sys

TORCH = "@TORCH@"  # the version of LibTorch that the program was built with
FOLDER = os.path.dirname(os.path.abspath(__file__))


def libtorch():
    """The folder of the libraries of the installed torch. torch is not imported, which would take seconds."""
    spec = importlib.util.find_spec("torch")
    if not spec or not spec.submodule_search_locations:
        sys.exit(f"tessera: this Python has no torch; write: pip install 'torch=={TORCH}.*'")
    found = importlib.metadata.version("torch")
    if found.split(".")[:2] != TORCH.split("."):
        sys.exit(f"tessera: torch {found} is installed, and the program was built with LibTorch {TORCH}; "
                 f"write: pip install 'torch=={TORCH}.*'")
    return os.path.join(spec.submodule_search_locations[0], "lib")


def main():
    paths = [libtorch(), os.environ.get("LD_LIBRARY_PATH", "")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
    program = os.path.join(FOLDER, "bin", "tessera")
    os.execv(program, [program, *sys.argv[1:]])
