"""Stand-ins for the CUDA libraries that PyPI's torch links against, for machines without a GPU.

PyPI carries torch's CUDA build. It wants some 3 GB of `nvidia-*` wheels before `import torch` succeeds, even where no
GPU will ever be used. This program reads which shared libraries and symbols torch's own libraries miss, assembles
libraries of those names whose functions do nothing (CUDA calls answer error 100, "no device"), and puts them beside
torch's. It is meant for test images and test environments on x86-64 without a GPU; images for GPUs come from upstream.

Usage, with the interpreter of an environment that got torch by `pip install --no-deps`:

    python torch_stub.py [--torch-lib DIRECTORY]

It needs `gcc`, `nm` and `readelf`. Torch's own CUDA libraries (1.3 GB) are deleted: stubs take their place. Running it
again is harmless.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

REMOVED = frozenset({"libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so"})
"""Torch's own libraries that hold nothing but CUDA code."""

HEIR_OF_UNVERSIONED = "libtorch_cuda.so"
"""The library whose stub defines every missing symbol without a version tag; versioned ones name their library."""

SYSTEM_LIBRARIES = (
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
)

_NEEDED = re.compile(r"\(NEEDED\).*\[([^]]+)\]")
_RETURNS_TEXT = (
    "cudaGetErrorString",
    "cudaGetErrorName",
    "ncclGetErrorString",
    "ncclGetLastError",
    "cudnnGetErrorString",
)
_CUDA_ERROR_NO_DEVICE = 100
_DATA_SYMBOL_BYTES = 512


def main(arguments: list[str]) -> int:
    """Stub the CUDA libraries that the torch of this interpreter (or of `--torch-lib`) misses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-lib", type=Path, help="torch's lib directory (default: that of this interpreter)")
    libraries_dir = parser.parse_args(arguments).torch_lib or installed_torch_lib()
    written = stub_cuda(libraries_dir)
    print(f"stubbed {len(written)} CUDA libraries in {libraries_dir}: {', '.join(written)}")
    return 0


def installed_torch_lib() -> Path:
    """Return the lib directory of this interpreter's torch, without importing it. Exits if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("this interpreter has no torch: install it with `pip install --no-deps` first")
    return Path(spec.origin).parent / "lib"


def stub_cuda(libraries_dir: Path) -> list[str]:
    """Replace the CUDA libraries that those in `libraries_dir` need by stubs; return the names of the stubs."""
    kept = [path for path in sorted(libraries_dir.iterdir()) if ".so" in path.name and path.name not in REMOVED]
    present = {path.name for path in kept} | set(SYSTEM_LIBRARIES)
    needed = {name for path in kept for name in needed_libraries(path)}
    missing = sorted(needed - present)

    by_version: dict[str, list[str]] = defaultdict(list)
    for symbol in undefined_symbols(kept):
        name, _, version = symbol.partition("@")
        by_version[version.lstrip("@")].append(name)

    with tempfile.TemporaryDirectory() as scratch:
        stubs = [
            assemble_stub(Path(scratch), library, by_version[""], version=None)
            if library == HEIR_OF_UNVERSIONED
            else assemble_stub(Path(scratch), library, by_version[library], version=library)
            for library in missing
        ]
        for name in REMOVED:
            (libraries_dir / name).unlink(missing_ok=True)
        for stub in stubs:
            shutil.copy(stub, libraries_dir / stub.name)
    return missing


def needed_libraries(library: Path) -> Iterator[str]:
    """Yield the names of the libraries that the dynamic loader wants for `library`."""
    for line in _output("readelf", "-d", str(library)):
        found = _NEEDED.search(line)
        if found:
            yield found[1]


def undefined_symbols(libraries: Iterable[Path]) -> list[str]:
    """Return the symbols (`name` or `name@version`) that no library here, nor the system, nor Python defines."""
    undefined: set[str] = set()
    defined: set[str] = set()
    for library in libraries:
        for symbol_type, symbol in _dynamic_symbols(library):
            if symbol_type == "U":
                undefined.add(symbol)
            elif symbol_type not in "wv":
                defined.add(symbol.partition("@")[0])
    for system in (*map(_system_path, SYSTEM_LIBRARIES), Path(sys.executable)):
        defined |= {symbol.partition("@")[0] for _, symbol in _dynamic_symbols(system)}
    return sorted(
        symbol
        for symbol in undefined
        if symbol.partition("@")[0] not in defined and not symbol.startswith(("Py", "_Py"))
    )


def assemble_stub(directory: Path, soname: str, symbols: Iterable[str], version: str | None) -> Path:
    """Assemble a shared library that defines `symbols`, tagged with `version` if one is given, and return its path."""
    names = list(symbols)
    library, source = directory / soname, directory / f"{soname}.s"
    footer = '.section .rodata\n.Ltext: .string "stub: there is no CUDA here"\n.section .note.GNU-stack,"",@progbits\n'
    source.write_text(".text\n" + "".join(map(_assembly, names)) + footer)
    command = ["gcc", "-shared", "-nostdlib", "-o", str(library), str(source), f"-Wl,-soname,{soname}"]
    if any(name.startswith("_ZTI") for name in names):
        command.append("-lstdc++")
    if version is not None and names:
        script = directory / f"{soname}.map"
        script.write_text(f"{version} {{ global: *; }};\n")
        command.append(f"-Wl,--version-script,{script}")
    subprocess.run(command, check=True)
    return library


def _assembly(symbol: str) -> str:
    """Return x86-64 assembly that defines one symbol harmlessly, of the kind that its (mangled) name implies."""
    function = f".globl {symbol}\n.type {symbol},@function\n{symbol}:"
    if symbol.startswith("_ZTI"):  # C++ type information, as of a class without bases
        return (
            f'.section .data.rel,"aw"\n.globl {symbol}\n.type {symbol},@object\n.size {symbol},16\n'
            f"{symbol}: .quad _ZTVN10__cxxabiv117__class_type_infoE+16\n .quad .Lname_{symbol}\n"
            f'.section .rodata\n.Lname_{symbol}: .string "{symbol[4:]}"\n.text\n'
        )
    if symbol.startswith(("_ZTV", "_ZTS", "_ZTT")):  # C++ vtables and names: zeroes
        return (
            f".data\n.globl {symbol}\n.type {symbol},@object\n.size {symbol},{_DATA_SYMBOL_BYTES}\n"
            f"{symbol}: .zero {_DATA_SYMBOL_BYTES}\n.text\n"
        )
    if symbol.startswith(_RETURNS_TEXT):
        return f"{function} lea .Ltext(%rip),%rax\n ret\n"
    if "get_gil_checker" in symbol:  # returns a reference that torch writes through while it is imported
        return f"{function} lea .Lbuffer(%rip),%rax\n ret\n.data\n.Lbuffer: .zero 4096\n.text\n"
    if "ProcessGroupNCCL7OptionsC" in symbol:  # a constructor whose object is used, by its vtable, during the import
        return (
            f"{function} lea .Lvtable+16(%rip),%rax\n mov %rax,(%rdi)\n ret\n"
            ".Lnothing: xor %eax,%eax\n ret\n"
            '.section .data.rel,"aw"\n.Lvtable: .quad 0\n .quad .Ltypeinfo\n'
            ".rept 32\n .quad .Lnothing\n.endr\n"
            ".Ltypeinfo: .quad _ZTVN10__cxxabiv117__class_type_infoE+16\n .quad .Ltypename\n"
            '.section .rodata\n.Ltypename: .string "8StubOpts"\n.text\n'
        )
    if symbol.startswith("_Z"):
        return f"{function} xor %eax,%eax\n ret\n"
    return f"{function} mov ${_CUDA_ERROR_NO_DEVICE},%eax\n ret\n"


def _dynamic_symbols(library: Path) -> Iterator[tuple[str, str]]:
    for line in _output("nm", "-D", str(library)):
        *_, symbol_type, symbol = line.split()
        yield symbol_type, symbol


def _system_path(library: str) -> Path:
    return Path(next(_output("gcc", f"-print-file-name={library}")))


def _output(*command: str) -> Iterator[str]:
    yield from subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
