"""Kernel sources to shared objects by g++, kept under build/emulator by a hash of all that goes into them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from edge_transformer.cuda.runtime import KernelSource

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "src/edge_transformer/cuda/kernels"
CACHE = HERE.parents[1] / "build/emulator"
FLAGS = ("-std=c++20", "-O2", "-march=native", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off")
RUNTIME = "emulator_runtime.cpp"
WARNINGS = ("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter", "-Wno-unused-function")


class EmulatorBuildError(AssertionError):
    """g++ refused a kernel source."""


@dataclass(frozen=True)
class Parameter:
    """`letter`: r pointer to const, w pointer, i integer, f floating point."""

    letter: str
    nbytes: int


class EmulatedKernel:
    """A compiled entry point. `parameters` as its signature has them."""

    def __init__(self, source: KernelSource, library: ctypes.CDLL) -> None:
        self.source = source
        self._library = library
        library.ete_signature.restype = ctypes.c_char_p
        library.ete_run.restype = ctypes.c_char_p
        words = library.ete_signature().decode().split()
        self.parameters = tuple(Parameter(word[0], int(word[1:])) for word in words)

    def run(
        self,
        grid: tuple[int, int, int],
        shared_bytes: int,
        shared_limit: int,
        arguments: list[ctypes._SimpleCData],
        descending: bool,
    ) -> str | None:
        """Run a launch; what went wrong, or None."""
        pointers = (ctypes.c_void_p * max(1, len(arguments)))(*(ctypes.addressof(value) for value in arguments))
        message = self._library.ete_run(
            ctypes.cast(self._library.ete_body, ctypes.c_void_p),
            pointers,
            *(ctypes.c_uint(size) for size in grid),
            ctypes.c_int(self.source.threads),
            ctypes.c_size_t(shared_bytes),
            ctypes.c_size_t(shared_limit),
            ctypes.c_int(descending),
        )
        return message.decode() if message else None


def emulated_kernel(source: KernelSource, arch: int) -> EmulatedKernel:
    """Compile (or find) `source`, its file relative to the kernels or absolute, as ETE_ARCH `arch`."""
    paths = (*sorted({*HERE.glob("*.hpp"), *KERNELS.glob("*.cuh")}), KERNELS / source.file, HERE / RUNTIME)
    return _loaded(source, arch, KERNELS, tuple((path, path.stat().st_mtime_ns) for path in paths))


@functools.cache
def _loaded(source: KernelSource, arch: int, kernels: Path, files: tuple[tuple[Path, int], ...]) -> EmulatedKernel:
    """`files`: all that goes into it, with the times of their last change."""
    digest = _digest(*(path.read_bytes() for path, _ in files), source, arch)
    target = CACHE / f"{source.entry}-{digest}.so"
    if not target.exists():
        _build(source, arch, kernels, target)
    return EmulatedKernel(source, ctypes.CDLL(str(target)))


@functools.cache
def _compiler() -> str:
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")][:1]
    return version + platform.machine() + "".join(model)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr((parts, FLAGS, _compiler())).encode()).hexdigest()[:24]


def _build(source: KernelSource, arch: int, kernels: Path, target: Path) -> None:
    wrapper = (
        f'#include "{kernels / source.file}"\n'
        f'extern "C" const char *ete_signature() {{ return ete_emulator::signature({source.entry}); }}\n'
        f'extern "C" void ete_body(void **arguments) {{ ete_emulator::invoke({source.entry}, arguments); }}\n'
    )
    defines = [
        f"-D{name}={value}" for name, value in (("ETE_ARCH", arch), ("ETE_THREADS", source.threads), *source.defines)
    ]
    includes = [f"-I{path}" for path in (_headers(), HERE, kernels)]
    _compile(
        [
            "-shared",
            "-Wl,-Bsymbolic",
            *WARNINGS,
            *defines,
            *includes,
            "-include",
            "emulator.hpp",
            "-x",
            "c++",
            "-",
            "-x",
            "none",
        ],
        [str(_runtime())],
        target,
        wrapper,
        f"{source.file}: {source.entry} {dict(source.defines)}",
    )


@functools.cache
def _runtime() -> Path:
    sources = [HERE / RUNTIME, HERE / "emulator.hpp"]
    target = CACHE / f"runtime-{_digest(*(path.read_bytes() for path in sources))}.o"
    if not target.exists():
        _compile(["-c", *WARNINGS, f"-I{HERE}", str(sources[0])], [], target, "", RUNTIME)
    return target


@functools.cache
def _headers() -> Path:
    """A folder with emulator.hpp compiled, which g++ takes instead of it: that is a third of a kernel's time."""
    header = HERE / "emulator.hpp"
    target = CACHE / f"headers-{_digest(header.read_bytes())}" / "emulator.hpp.gch"
    if not target.exists():
        _compile(["-x", "c++-header", str(header)], [], target, "", header.name)
    return target.parent


def _compile(options: list[str], objects: list[str], target: Path, stdin: str, what: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
    os.close(handle)
    command = ["g++", *FLAGS, *options, *objects, "-o", name]
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        os.unlink(name)
        raise EmulatorBuildError(f"g++ refuses {what}:\n{result.stderr}")
    os.replace(name, target)
