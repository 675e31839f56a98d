"""A real GPU through the driver facade, one line per check: python tests/cuda/gpu_smoke.py

Run by hand on a machine with a GPU (an editable install, the extra `cuda`). Ends with status 1 when a check failed.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from edge_transformer.cuda import compiler
from edge_transformer.cuda.arena import Arena
from edge_transformer.cuda.cubin_cache import KernelCache
from edge_transformer.cuda.driver import CudaGpu
from edge_transformer.cuda.runtime import KernelSource
from edge_transformer.errors import CapacityError, GpuError, UsageError
from emulator import DeviceArrays

KERNELS = Path(__file__).parent / "kernels"
MIB = 1 << 20
COUNT = 1000


def basic(entry: str, threads: int = 128, **defines: object) -> KernelSource:
    path = str(KERNELS / "basic.cu")  # absolute: joined to the product's folder it stays what it is
    return KernelSource(path, entry, threads, tuple((name, str(value)) for name, value in defines.items()))


class Checks:
    def __init__(self) -> None:
        self.failed = 0

    def run(self, name: str, check: Callable[[], str]) -> None:
        try:
            print(f"ok      {name}: {check()}", flush=True)
        except Exception as error:  # noqa: BLE001 - every check is run, whatever another one met
            self.failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)


def expect(kind: type[Exception], action: Callable[[], object]) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def rate(gpu: CudaGpu, destination: int, source: int, nbytes: int) -> str:
    stream = gpu.stream("rate")
    start, end = gpu.event(timing=True), gpu.event(timing=True)
    gpu.copy(destination, source, nbytes, stream)
    gpu.record(start, stream)
    for _ in range(4):
        gpu.copy(destination, source, nbytes, stream)
    gpu.record(end, stream)
    gpu.synchronize(stream)
    return f"{4 * nbytes / end.elapsed_ms(start) / 1e6:.1f} GB/s"


def memory(gpu: CudaGpu) -> str:
    before = gpu.memory_info()[0]
    block = gpu.allocate(256 * MIB, "a block")
    taken = before - gpu.memory_info()[0]
    assert block.address % 256 == 0
    block.close()
    block.close()
    return f"{taken / MIB:.0f} MiB taken by 256, {(before - gpu.memory_info()[0]) / MIB:.0f} kept after close"


def too_much(gpu: CudaGpu) -> str:
    return expect(CapacityError, lambda: Arena(gpu, gpu.properties.total_bytes * 2))


def arena(gpu: CudaGpu) -> str:
    pool = Arena(gpu, MIB)
    pool.take(1000, "first")
    message = expect(CapacityError, lambda: pool.take(MIB, "second"))
    pool.close()
    return message


def copies(gpu: CudaGpu) -> str:
    host, device = gpu.allocate_host(256 * MIB, "host"), gpu.allocate(256 * MIB, "device")
    values = np.random.default_rng(0).integers(0, 256, 256 * MIB, np.uint8)
    ctypes.memmove(host.address, values.ctypes.data, values.nbytes)
    stream = gpu.stream("copy")
    gpu.copy(device.address, host.address, host.nbytes, stream)
    gpu.fill(device.address + 5, 3, 7, stream)
    gpu.synchronize(stream)
    ctypes.memset(host.address, 0, 100)
    gpu.copy(host.address, device.address + 3, 97, stream)
    gpu.synchronize(stream)
    values[5:8] = 7
    got = np.frombuffer((ctypes.c_uint8 * 97).from_address(host.address), np.uint8)
    assert (got == values[3:100]).all()
    rates = rate(gpu, device.address, host.address, host.nbytes), rate(gpu, host.address, device.address, host.nbytes)
    odd = rate(gpu, device.address, host.address + 8, host.nbytes - 8)
    host.close()
    device.close()
    return f"partial copy right; to the device {rates[0]} (from 8 mod 16: {odd}), back {rates[1]}"


def registration(gpu: CudaGpu) -> str:
    if not gpu.properties.can_register_read_only:
        return "the device cannot"
    nbytes = 256 * MIB + 8
    with tempfile.NamedTemporaryFile() as file:
        file.write(np.arange(nbytes // 8, dtype=np.int64).tobytes())
        file.flush()
        # Shared, as model files are mapped: registering a private read-only mapping hangs in cuMemHostRegister.
        mapped = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        view = np.frombuffer(mapped, np.uint8)
        device = gpu.allocate(256 * MIB, "device")
        start = time.perf_counter()
        registered = gpu.register_host(view.ctypes.data, nbytes, read_only=True)
        took = time.perf_counter() - start
        if registered is None:
            device.close()
            return "refused"
        with registered:
            speed = rate(gpu, device.address, view.ctypes.data + 8, 256 * MIB)
        arrays = DeviceArrays(gpu)
        back = gpu.allocate_host(MIB, "back")
        gpu.copy(back.address, device.address, MIB, arrays.stream)
        gpu.synchronize()
        got = np.frombuffer((ctypes.c_int64 * (MIB // 8)).from_address(back.address), np.int64)
        assert (got == np.arange(1, MIB // 8 + 1)).all()
        back.close()
        device.close()
        del view
        mapped.close()
    return f"a read-only mapping of 256 MiB: {took * 1e3:.0f} ms, then {speed}"


def kernel(gpu: CudaGpu) -> str:
    arrays = DeviceArrays(gpu)
    random = np.random.default_rng(1)
    x, y = random.standard_normal((2, COUNT)).astype(np.float32)
    addresses = arrays.put(x, "x"), arrays.put(y, "y"), arrays.empty(COUNT, np.float32, "out")
    loaded = gpu.kernel(basic("scale_add"))
    gpu.launch(loaded, (8, 1, 1), 0, arrays.stream, (*addresses, np.float32(3), np.int64(COUNT)))
    got = arrays.get(addresses[2])
    assert (got == (x.astype(np.float64) * 3 + y).astype(np.float32)).all()
    start = time.perf_counter()
    for _ in range(1000):
        gpu.launch(loaded, (8, 1, 1), 0, arrays.stream, (*addresses, np.float32(3), np.int64(COUNT)))
    took = time.perf_counter() - start
    arrays.close()
    return f"right; {loaded.compiled.target}, {loaded.compiled.resources}; {took * 1e3:.1f} us of Python for a launch"


def large_shared(gpu: CudaGpu) -> str:
    arrays = DeviceArrays(gpu)
    x = np.arange(1024, dtype=np.uint32)
    addresses = arrays.put(x, "x"), arrays.empty(1024, np.uint32, "out")
    most = gpu.properties.shared_bytes_per_block
    loaded = gpu.kernel(basic("reverse_block", 1024))
    gpu.launch(loaded, (1, 1, 1), most, arrays.stream, addresses)
    assert (arrays.get(addresses[1]) == x[::-1]).all()
    message = expect(GpuError, lambda: gpu.launch(loaded, (1, 1, 1), most + 16, arrays.stream, addresses))
    arrays.close()
    return f"{most} bytes work; more: {message}"


def events(gpu: CudaGpu) -> str:
    arrays = DeviceArrays(gpu)
    counter = arrays.put(np.zeros(1, np.int32), "counter")
    one, other = gpu.stream("one"), gpu.stream("other")
    loaded = gpu.kernel(basic("count_up", 32))
    passed = [gpu.event(), gpu.event()]
    for _ in range(500):  # two streams in turns: without the waits additions would be lost
        for stream, event in zip((one, other), passed, strict=True):
            gpu.launch(loaded, (1, 1, 1), 0, stream, (counter,))
            gpu.record(event, stream)
            gpu.wait(other if stream is one else one, event)
    got = int(arrays.get(counter)[0])
    arrays.close()
    assert got == 1000, got
    return "1000 additions on two streams in turns"


def graph(gpu: CudaGpu) -> str:
    arrays = DeviceArrays(gpu)
    counter = arrays.put(np.zeros(1, np.int32), "counter")
    one, other = gpu.stream("one"), gpu.stream("other")
    loaded = gpu.kernel(basic("count_up", 32, ETE_STEP=3))
    fork, join = gpu.event(), gpu.event()
    gpu.begin_capture(one)
    for _ in range(100):
        gpu.launch(loaded, (1, 1, 1), 0, one, (counter,))
    gpu.record(fork, one)
    gpu.wait(other, fork)
    for _ in range(200):
        gpu.launch(loaded, (1, 1, 1), 0, other, (counter,))
    gpu.record(join, other)
    gpu.wait(one, join)
    captured = gpu.end_capture(one)
    assert arrays.get(counter)[0] == 0
    captured.launch(one)
    gpu.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        captured.launch(one)
    gpu.synchronize()
    took = (time.perf_counter() - start) / 10
    assert arrays.get(counter)[0] == 11 * 900
    captured.close()
    arrays.close()
    return f"300 kernels in {took * 1e6:.0f} us"


def recording_beside_another(gpu: CudaGpu) -> str:
    """A graph is recorded while another thread opens, uses and closes the same card."""
    arrays, stream = DeviceArrays(gpu), gpu.stream("recorded")
    counter = arrays.put(np.zeros(1, np.int32), "counter")
    loaded = gpu.kernel(basic("count_up", 32, ETE_STEP=3))
    failures: list[Exception] = []

    def use() -> None:
        try:
            other = CudaGpu()
            others = DeviceArrays(other)
            theirs = others.put(np.zeros(1, np.int32), "counter")
            other.launch(other.kernel(basic("count_up", 32, ETE_STEP=3)), (1, 1, 1), 0, others.stream, (theirs,))
            other.synchronize()
            assert others.get(theirs)[0] == 3
            others.close()
            other.close()
        except Exception as error:  # noqa: BLE001 - raised below, by the thread that waits
            failures.append(error)

    gpu.begin_capture(stream)
    gpu.launch(loaded, (1, 1, 1), 0, stream, (counter,))
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    gpu.launch(loaded, (1, 1, 1), 0, stream, (counter,))
    captured = gpu.end_capture(stream)
    if failures:
        raise failures[0]
    captured.launch(stream)
    gpu.synchronize()
    assert arrays.get(counter)[0] == 6
    captured.close()
    arrays.close()
    return "neither noticed the other"


def forced_path() -> str:
    gpu = CudaGpu(forced_capability=(7, 5))
    loaded = gpu.kernel(basic("scale_add"))
    message = f"{gpu.properties.capability} on {loaded.compiled.target}; {kernel(gpu)}"
    gpu.close()
    return message


def messages(gpu: CudaGpu) -> str:
    loaded = gpu.kernel(basic("scale_add"))
    stream = gpu.stream("s")
    host, device = gpu.allocate_host(1024, "host"), gpu.allocate(1024, "device")
    found = [
        expect(GpuError, lambda: gpu.launch(loaded, (8, 1, 1), 0, stream, (0, 0, 0))),
        expect(GpuError, lambda: gpu.launch(loaded, (0, 1, 1), 0, stream, (0, 0, 0, np.float32(1), np.int64(0)))),
        expect(GpuError, lambda: gpu.launch(loaded, (1, 1, 1), 0, stream, (0, 0, 0, 1.0, np.int64(0)))),  # type: ignore[arg-type]
        expect(GpuError, lambda: gpu.copy(device.address, host.address, 1 << 40, stream)),
        expect(GpuError, lambda: gpu.kernel(basic("no_such_entry"))),
        expect(GpuError, lambda: gpu.kernel(basic("scale_add", ETE_THREADS="nonsense("))).splitlines()[0],
        expect(UsageError, lambda: CudaGpu(99)),
        expect(UsageError, lambda: CudaGpu(forced_capability=(6, 1))),
    ]
    host.close()
    device.close()
    return "".join(f"\n          {line[:300]}" for line in found)


def wild_write() -> str:
    """In a process of its own: the context is lost by it."""
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]; import numpy as np; from gpu_smoke import *; gpu = CudaGpu(); "
        "block = gpu.allocate(1024, 'x'); kernel = gpu.kernel(basic('wild_write', 32)); "
        "gpu.launch(kernel, (1, 1, 1), 0, gpu.stream('s'), (np.int64(64),)); "
        "print(expect(GpuError, gpu.synchronize)); block.close(); gpu.close()"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def compile_cache() -> str:
    with tempfile.TemporaryDirectory() as folder:
        gpu = CudaGpu(cache=KernelCache(Path(folder)))
        start = time.perf_counter()
        gpu.kernel(basic("block_sum"))
        first = time.perf_counter() - start
        gpu.close()
        gpu = CudaGpu(cache=KernelCache(Path(folder)))
        start = time.perf_counter()
        gpu.kernel(basic("block_sum"))
        second = time.perf_counter() - start
        gpu.close()
    return f"first {first * 1e3:.0f} ms, from the cache {second * 1e3:.1f} ms"


def main() -> int:
    checks = Checks()
    gpu = CudaGpu()
    print(f"        {gpu.properties}", flush=True)
    print(f"        NVRTC {compiler.compiler_version()}", flush=True)
    for check in (
        memory,
        too_much,
        arena,
        copies,
        registration,
        kernel,
        large_shared,
        events,
        graph,
        recording_beside_another,
        messages,
    ):
        checks.run(check.__name__, lambda check=check: check(gpu))  # type: ignore[misc]
    checks.run("close", lambda: str(gpu.close()))
    for alone in (forced_path, compile_cache, wild_write):
        checks.run(alone.__name__, alone)
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
