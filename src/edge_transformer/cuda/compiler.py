"""Kernel sources to machine code by NVRTC, on the user's machine, kept in the disk cache. Needs no driver and no GPU.

Two architectures play a part. ETE_ARCH is the path a kernel takes (what it may use); the target is what the machine
code is for. They differ only when a path is forced: the code of the sm_75 path is then made for the card that is there,
so it loads without the driver's own compiler, whose version need not know ours.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_transformer.cuda.cubin_cache import KernelCache
from edge_transformer.cuda.runtime import KernelSource
from edge_transformer.errors import GpuError
from edge_transformer.hub.progress import Progress, silent

KERNEL_FOLDER = Path(__file__).parent / "kernels"
OLDEST = 75

# Products are contracted only where the source says fmaf: otherwise each specialisation would round in its own way.
# No line information: it makes the code four to nine times as large.
OPTIONS = ("-std=c++17", "--fmad=false", "--ptxas-options=-v")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_USED = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Resources:
    """What the assembler reports. Registers per thread; bytes per thread, shared bytes (static) per block."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """`code` is machine code for `target` "sm_90", or PTX when the target is "compute_90"."""

    source: KernelSource
    target: str
    code: bytes
    resources: Resources | None  # None: PTX, which no assembler has seen


def compile_all(
    sources: Sequence[KernelSource],
    path_arch: int,
    capability: tuple[int, int] | None = None,
    cache: KernelCache | None = None,
    folder: Path = KERNEL_FOLDER,
    progress: Progress = silent,
) -> list[CompiledKernel]:
    """The kernels as ETE_ARCH `path_arch` for a card of `capability` (None: the path's own), in the order of `sources`.

    Those not in `cache` are compiled, several at once; `progress` is told "compiling NAME", how many of them are done
    and how many there are. Raises GpuError with the compiler's log when it refuses, or when NVRTC is not installed.
    """
    target = _target(path_arch if capability is None else capability[0] * 10 + capability[1])
    jobs = [_Job.of(source, path_arch, target, folder) for source in sources]
    results = [None if cache is None else _from_cache(job, cache) for job in jobs]
    missing = [index for index, result in enumerate(results) if result is None]
    if not missing:
        return [result for result in results if result is not None]
    progress(f"compiling {jobs[missing[0]].source.entry}", 0, len(missing))
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), len(missing)), thread_name_prefix="nvrtc") as pool:
        pending = {pool.submit(_compile, jobs[index]): index for index in missing}
        try:
            for done, future in enumerate(as_completed(pending), 1):
                index = pending[future]
                results[index] = future.result()
                if cache is not None:
                    _into_cache(jobs[index], future.result(), cache)
                progress(f"compiling {jobs[index].source.entry}", done, len(missing))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [result for result in results if result is not None]


def compile_kernel(
    source: KernelSource,
    path_arch: int,
    capability: tuple[int, int] | None = None,
    cache: KernelCache | None = None,
    folder: Path = KERNEL_FOLDER,
    progress: Progress = silent,
) -> CompiledKernel:
    """One kernel, as `compile_all`."""
    return compile_all([source], path_arch, capability, cache, folder, progress)[0]


# ---- what goes into a kernel


def _with_headers(file: str, folder: Path) -> dict[str, str]:
    """The text of `file` and of every header it includes, by name; those not in `folder` are left to the compiler."""
    texts: dict[str, str] = {}
    waiting = [file]
    while waiting:
        name = waiting.pop()
        path = folder / name
        if name not in texts and (name == file or path.is_file()):
            texts[name] = _read(path)
            waiting += _INCLUDE.findall(texts[name])
    return texts


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise GpuError(f"the kernel source {path} cannot be read: {error}; install the package again") from error


@dataclass(frozen=True, slots=True)
class _Job:
    """A kernel to be made, under the name and key it has in the cache."""

    source: KernelSource
    target: str
    texts: dict[str, str]
    options: tuple[str, ...]
    name: str
    key: str

    @staticmethod
    def of(source: KernelSource, path_arch: int, target: str, folder: Path) -> _Job:
        defines = (("ETE_ARCH", str(path_arch)), ("ETE_THREADS", str(source.threads)), *source.defines)
        options = (f"-arch={target}", *OPTIONS, *(f"-D{name}={value}" for name, value in defines))
        texts = _with_headers(source.file, folder)
        content = json.dumps([source.file, source.entry, sorted(texts.items()), options, compiler_version()])
        key = hashlib.sha256(content.encode()).hexdigest()[:32]
        return _Job(source, target, texts, options, f"{source.entry}-{target}", key)


def _from_cache(job: _Job, cache: KernelCache) -> CompiledKernel | None:
    stored = cache.get(job.name, job.key)
    if stored is None:
        return None
    line, _, code = stored.partition(b"\n")
    header = json.loads(line)
    resources = None if header["resources"] is None else Resources(**header["resources"])
    return CompiledKernel(job.source, header["target"], code, resources)


def _into_cache(job: _Job, compiled: CompiledKernel, cache: KernelCache) -> None:
    resources = None if compiled.resources is None else asdict(compiled.resources)
    header = {"source": asdict(job.source), "target": compiled.target, "resources": resources}
    try:
        cache.put(job.name, job.key, json.dumps(header).encode() + b"\n" + compiled.code)
    except OSError as error:
        warnings.warn(
            f"compiled kernels cannot be kept in {cache.folder} ({error}): they are compiled at every start; "
            "ETE_CACHE names another folder",
            stacklevel=2,
        )


# ---- NVRTC


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise GpuError(
            f"the compiler of the GPU kernels is not installed ({error}): pip install 'edge-transformer-engine[cuda]' "
            "(NVIDIA driver 580 or later), or [cuda12] (driver 525 or later)"
        ) from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the package is there, the library it loads is not
        raise GpuError(
            f"the library NVRTC cannot be loaded ({error}): pip install nvidia-cuda-nvrtc, or nvidia-cuda-nvrtc-cu12 "
            "with the extra cuda12"
        ) from error
    return nvrtc


@functools.cache
def compiler_version() -> str:
    version = ".".join(map(str, _checked("nvrtcVersion", _nvrtc().nvrtcVersion())))
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            return f"{version} {package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return version


@functools.cache
def _supported() -> tuple[int, ...]:
    return tuple(_checked("nvrtcGetSupportedArchs", _nvrtc().nvrtcGetSupportedArchs())[0])


def _target(arch: int) -> str:
    """What to compile for: the card itself, an older one of its generation, or PTX for one that NVRTC does not know."""
    if arch < OLDEST:
        raise GpuError(f"the GPU has compute capability {arch / 10}; the kernels need {OLDEST / 10} or later")
    known = [supported for supported in _supported() if supported <= arch]
    if not known:
        raise GpuError(f"NVRTC {compiler_version()} compiles for {_supported()}, not for {arch}: install another")
    same_generation = known[-1] // 10 == arch // 10
    return f"sm_{known[-1]}" if same_generation else f"compute_{known[-1]}"


def _compile(job: _Job) -> CompiledKernel:
    nvrtc = _nvrtc()
    source, target, texts, options = job.source, job.target, job.texts, job.options
    headers = [name for name in texts if name != source.file]
    (program,) = _checked(
        "nvrtcCreateProgram",
        nvrtc.nvrtcCreateProgram(
            texts[source.file].encode(),
            source.file.encode(),
            len(headers),
            [texts[name].encode() for name in headers],
            [name.encode() for name in headers],
        ),
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _text(program, "ProgramLog").decode(errors="replace").strip("\0 \n")
        if status == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            raise GpuError(f"{source.file}: {source.entry} does not compile with {' '.join(options)}:\n{log}")
        _checked(f"nvrtcCompileProgram({source.file}: {source.entry}, {' '.join(options)})", (status,))
        if target.startswith("compute_"):
            return CompiledKernel(source, target, _text(program, "PTX"), None)
        return CompiledKernel(source, target, _text(program, "CUBIN"), _resources(log, source))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(program: Any, what: str) -> bytes:
    nvrtc = _nvrtc()
    (size,) = _checked(f"nvrtcGet{what}Size", getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    buffer = bytearray(size)
    _checked(f"nvrtcGet{what}", getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return bytes(buffer)


def _resources(log: str, source: KernelSource) -> Resources | None:
    """From the assembler's report on the entry point (its functions, where not inlined, come in other sections)."""
    sections = re.split(r"Compiling entry function '([^']+)'", log)
    report = next((text for name, text in zip(sections[1::2], sections[2::2], strict=True) if name == source.entry), "")
    used, stack, shared = _USED.search(report), _STACK.search(report), _SHARED.search(report)
    if used is None or stack is None:
        return None
    return Resources(int(used[1]), int(stack[1]), int(stack[2]), int(stack[3]), int(shared[1]) if shared else 0)


def _checked(call: str, result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What an NVRTC call returned after its status. Raises GpuError naming the call."""
    nvrtc = _nvrtc()
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise GpuError(f"{call}: {result[0].name}")
    return result[1:]
