"""init() must refuse a process that has loaded Python's autograd engine. Argument: the probe library."""
import ctypes
import sys

try:
    import torch  # noqa: F401  (loads Python's autograd engine)
except ImportError:
    print("[  SKIPPED ] this Python has no torch")
    sys.exit(0)
probe = ctypes.CDLL(sys.argv[1])
probe.tessera_init_error.restype = ctypes.c_char_p
message = probe.tessera_init_error().decode()
print(message)
sys.exit(0 if "Python" in message and "accepted" not in message else 1)
