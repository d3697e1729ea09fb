"""init() must refuse a process in which Python's autograd engine is at work. Argument: the probe library."""
import ctypes
import sys

try:
    import torch  # noqa: F401  (installs Python's engine)
except ImportError:
    print("[  SKIPPED ] this Python has no torch")
    sys.exit(0)
probe = ctypes.CDLL(sys.argv[1])
probe.tessera_init_says.restype = ctypes.c_char_p
said = probe.tessera_init_says().decode()
print(said)
sys.exit(0 if "Python" in said and "accepted" not in said else 1)
