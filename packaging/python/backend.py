"""The build backend (PEP 517) of the wheel: installs the build, takes the program and its libraries, writes the archive.

It compiles nothing. The wheel needs the torch whose LibTorch the build used, to the minor version: that is the limit of
LibTorch's binary interface."""
import base64
import hashlib
import os
import pathlib
import re
import subprocess
import sysconfig
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SUMMARY = "Distributed tensors and SPMD training for LibTorch in C++: the program tessera"


def version():
    text = (ROOT / "tessera/version.h").read_text()
    return ".".join(re.search(rf"VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def build_folder():
    folder = pathlib.Path(os.environ.get("TESSERA_BUILD_DIR", ROOT / "build/release")).resolve()
    if not (folder / "bin/tessera").exists():
        raise SystemExit(f"{folder} has no bin/tessera; build the target tessera_program first, or set TESSERA_BUILD_DIR")
    return folder


def torch_version(build):
    """Of the LibTorch that the build used: '2.13'."""
    script = (build / "tessera-use-torch").read_text()
    return ".".join(re.search(r"^needed=([\d.]+)$", script, re.M)[1].split(".")[:2])


def files_of(build, folder):
    """(path in the wheel, bytes, mode): the package, the program and the libraries by the names that the loader asks for."""
    prefix = pathlib.Path(folder) / "prefix"
    for command in (["cmake", "--install", build, "--prefix", prefix, "--strip"],
                    ["cmake", f"-DTREE={prefix}", "-P", ROOT / "packaging/remove_build_paths.cmake"]):
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    for source in sorted((HERE / "tessera").glob("*.py")):
        yield f"tessera/{source.name}", source.read_bytes().replace(b"@TORCH@", torch_version(build).encode()), 0o644
    yield "tessera/bin/tessera", (prefix / "bin/tessera").read_bytes(), 0o755
    for library in sorted(prefix.glob("lib*/lib*.so.*")):
        if re.fullmatch(r".*\.so\.\d+\.\d+", library.name):  # the soname; wheels have no links
            yield f"tessera/lib/{library.name}", library.read_bytes(), 0o755


def metadata_of(build):
    torch = torch_version(build)
    major, minor = torch.split(".")
    name, tag = f"tessera-{version()}.dist-info", "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: tessera\nVersion: {version()}\nSummary: {SUMMARY}\n"
                    f"Requires-Python: >=3.9\nRequires-Dist: torch>={torch},<{major}.{int(minor) + 1}\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: tessera\nRoot-Is-Purelib: false\nTag: {tag}\n",
        "entry_points.txt": "[console_scripts]\ntessera = tessera:main\n",
        "LICENSE": (ROOT / "LICENSE").read_text(),
    }
    return name, tag, texts


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    build = build_folder()
    name, tag, texts = metadata_of(build)
    wheel = f"tessera-{version()}-{tag}.whl"
    record = []
    with tempfile.TemporaryDirectory() as folder, \
            zipfile.ZipFile(os.path.join(wheel_directory, wheel), "w", zipfile.ZIP_DEFLATED) as archive:
        files = list(files_of(build, folder)) + [(f"{name}/{file}", text.encode(), 0o644) for file, text in texts.items()]
        for path, data, mode in files:
            info = zipfile.ZipInfo(path, date_time=(2020, 1, 1, 0, 0, 0))  # equal builds give equal wheels
            info.external_attr = (0o100000 | mode) << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(data)}")
        archive.writestr(f"{name}/RECORD", "\n".join(record + [f"{name}/RECORD,,"]) + "\n")
    return wheel


def build_sdist(sdist_directory, config_settings=None):
    raise NotImplementedError("the wheel is made from a CMake build, not from a source distribution")
