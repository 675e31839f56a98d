"""What goes wrong on a real GPU ends with a clear error or cleanly, in time: python tests/cuda/gpu_faults.py [NAME]

A launch that fails, an allocation refused, a kernel that writes out of bounds, a file truncated under the mapping,
Ctrl-C in the middle of a pass (once and twice), while a prompt is read and while kernels compile; GPU memory is back
after each. One line per check, each a process of its own with a time limit. The model is made on the spot: random
weights, 0.4 GB of bf16, streamed from the mapped file. Run by hand on a machine with a GPU. Ends with status 1 when a
check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda.placements import Way, feed, random_prompts
from cuda.real_gpu import run_side_by_side
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.cuda.driver import CudaGpu
from edge_transformer.cuda.runtime import Argument, Kernel, KernelSource, Stream
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
from edge_transformer.engine.weights import HostWeights
from edge_transformer.errors import CapacityError, EdgeTransformerError, GpuError, UsageError
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import HeadPlace, Wishes
from tiny.weights import tensor_shapes

MIB = 1 << 20
LIMIT_S = 60.0
INTERRUPTED = 130
FILE_CHANGED = 3
SECONDS_AFTER_INTERRUPT = 2.0
VOCABULARY = 300
MODES = {
    "resident": Wishes(4 << 30, -1, kv_offload=False, head=HeadPlace.GPU),
    "streamed": Wishes(4 << 30, 0, slots=2, kv_offload=True, head=HeadPlace.STREAMED),
}
STREAMED = ("--resident-layers", "0", "--slots", "2", "--kv-offload", "--lm-head", "streamed")


# ---- the model


def write_model(folder: Path) -> Path:
    """A Llama of 16 layers with random weights, a tokenizer of single bytes and no end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    numbers = np.random.default_rng(1).standard_normal(1 << 20, np.float32) / 40
    pool = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    header: dict[str, object] = {}
    end = 0
    for name, shape in tensor_shapes(config).items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensor_shapes(config).items():
            count = int(np.prod(shape))
            if name.endswith("norm.weight"):
                file.write(np.full(count, 0x3F80, np.uint16).tobytes())
            else:
                file.write(np.resize(pool, count).tobytes())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def open_engine(path: Path, mode: str, gpu: CudaGpu) -> Engine:
    checkpoint = open_checkpoint(path)
    spec = read_model(checkpoint)
    weights = HostWeights(checkpoint, spec)
    try:
        return open_gpu_engine(
            gpu, checkpoint, spec, weights, CpuBackend(1), DType.BF16, GpuOptions(MODES[mode], 2048)
        )[0]
    except BaseException:
        gpu.close()
        raise


# ---- faults of the driver, in this process


class FaultyGpu(CudaGpu):
    """Once armed, the n-th launch asks for a grid of no blocks, which the driver refuses."""

    left = 0

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        shared_bytes: int,
        stream: Stream,
        arguments: Sequence[Argument],
        reads: Sequence[tuple[int, int]] = (),
        writes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.left -= 1
        super().launch(kernel, grid if self.left else (0, 1, 1), shared_bytes, stream, arguments, reads, writes)


def launch_fails(path: Path) -> str:
    """In prompt and decode passes of both modes: the error names the call, and the engine goes on with right bits."""
    prompts = random_prompts([(40, 4)], VOCABULARY)
    messages: list[str] = []
    for mode in MODES:
        gpu = FaultyGpu()
        engine = open_engine(path, mode, gpu)
        expected = feed(engine, prompts, Way(16))[0]
        for at in (1, 2, 7, 50, 101):
            for kind in ("prompt", "decode"):
                sequence = engine.new_sequence()
                engine.step([Chunk(sequence, prompts[0].tokens[:16], "prompt")])
                gpu.left = at
                try:
                    result = engine.step([Chunk(sequence, prompts[0].tokens[16:20], kind, "last")])  # type: ignore[arg-type]
                    assert result is not None
                    result.logits()
                    assert gpu.left > 0, f"{mode}: launch {at} of a {kind} pass was refused, and no error came"
                except GpuError as error:
                    messages.append(str(error))
                gpu.left = 0
                sequence.close()
                assert np.array_equal(feed(engine, prompts, Way(16))[0], expected), f"{mode}: other bits after a fault"
        engine.close()
    assert all("cuLaunchKernel" in message and "INVALID_VALUE" in message for message in messages), messages
    return f"{len(messages)} faults, right bits after each; {messages[0][:110]}"


def kernel_writes_out_of_bounds(path: Path) -> str:
    """The context is lost: the next call says so and what was queued, and closing ends."""
    gpu = CudaGpu()
    engine = open_engine(path, "streamed", gpu)
    sequence = engine.new_sequence()
    engine.step([Chunk(sequence, [1, 2, 3], "prompt")])
    source = KernelSource(str(Path(__file__).parent / "kernels" / "basic.cu"), "wild_write", 32)
    gpu.launch(gpu.kernel(source), (1, 1, 1), 0, gpu.stream("another"), (np.int64(64),))
    message = ""
    try:
        while True:
            engine.step([Chunk(sequence, [4], "decode")])
    except GpuError as error:
        message = str(error)
    assert "cannot be used again" in message, message
    with contextlib.suppress(GpuError):
        engine.close()
    return message[:160]


def allocation_refused(path: Path) -> str:
    """Another program has the memory: the arena's refusal is named; once the memory is free the same model opens."""
    gpu = CudaGpu()
    taken = []
    for nbytes in (1 << power for power in range(36, 21, -1)):
        with contextlib.suppress(CapacityError):
            while True:
                taken.append(gpu.allocate(nbytes, "another program's"))
    free = gpu.memory_info()[0]
    try:
        open_engine(path, "resident", CudaGpu())
    except CapacityError as error:
        message = str(error)
    else:
        raise AssertionError(f"an arena was opened in {free} free bytes")
    assert "arena: " in message, message
    assert "are free on" in message, message
    for memory in taken:
        memory.close()
    engine = open_engine(path, "resident", CudaGpu())
    engine.step([Chunk(engine.new_sequence(), [1], "decode")])
    engine.close()
    gpu.close()
    return message[:160]


def memory_is_back(path: Path) -> str:
    """After engine.close() as much is free as after the engine before it (the first of a process warms the driver)."""
    outer = CudaGpu()
    used: list[int] = []
    free: list[int] = []
    for _ in range(2):
        for mode in MODES:
            engine = open_engine(path, mode, CudaGpu())
            feed(engine, random_prompts([(40, 4)], VOCABULARY), Way(16))
            used.append(outer.memory_info()[0])
            engine.close()
            free.append(outer.memory_info()[0])
    outer.close()
    assert free[2] == free[0], free
    assert free[3] == free[1], free
    return f"engines had taken {', '.join(f'{(b - a) / MIB:.0f}' for a, b in zip(used, free, strict=True))} MiB"


def close_while_a_pass_runs(path: Path) -> str:
    took = []
    for mode in MODES:
        engine = open_engine(path, mode, CudaGpu())
        ended: list[BaseException] = []
        running = threading.Event()

        def passes(
            engine: Engine = engine, ended: list[BaseException] = ended, running: threading.Event = running
        ) -> None:
            sequence = engine.new_sequence()
            try:
                while True:
                    with engine.lock:
                        engine.step([Chunk(sequence, [1], "decode")])
                    running.set()
            except EdgeTransformerError as error:
                ended.append(error)

        thread = threading.Thread(target=passes, daemon=True)
        thread.start()
        assert running.wait(20)
        started = time.perf_counter()
        engine.close()
        took.append(time.perf_counter() - started)
        thread.join(10)
        assert not thread.is_alive()
        assert isinstance(ended[0], UsageError), ended
    return f"closed within {max(took):.2f} s"


# ---- `ete run` as a process


@contextlib.contextmanager
def ete_run(path: Path, *options: str, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "from edge_transformer.cli.entry import main; main()", "run", str(path)]
    command += ["--backend", "cuda", "--raw", "--ignore-eos", "--max-tokens", "30000", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | (environment or {})
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_text(process: subprocess.Popen[bytes], stream: str, expected: bytes = b"") -> bytes:
    """Read until `expected` has come on "stdout" or "stderr" (with none: until there is something)."""
    pipe = getattr(process, stream)
    seen = b""
    while expected not in seen or not seen:
        piece = os.read(pipe.fileno(), 4096)
        assert piece, f"ended early: {seen!r} {process.stderr.read()[-600:] if process.stderr else ''!r}"
        seen += piece
    return seen


def end_of(
    process: subprocess.Popen[bytes], what: str, limit_s: float = SECONDS_AFTER_INTERRUPT
) -> tuple[float, bytes]:
    """(seconds until the process ended, what it then said on standard error)."""
    started = time.perf_counter()
    _, errors = process.communicate(timeout=20)
    took = time.perf_counter() - started
    assert took <= limit_s, f"{what}: ended after {took:.2f} s"
    assert b"Traceback" not in errors, errors[-2000:]
    return took, errors


def file_truncated(path: Path) -> str:
    copy = path.with_name("truncated")
    shutil.copytree(path, copy)
    with ete_run(copy, *STREAMED, "hello") as process:
        wait_for_text(process, "stdout")
        time.sleep(0.2)
        os.truncate(copy / "model.safetensors", 5000)
        took, errors = end_of(process, "after the truncation")
        assert process.returncode == FILE_CHANGED, (process.returncode, errors[-600:])
    line = errors.decode().strip().splitlines()[-1]
    assert "to 5000 bytes" in line, errors
    return f"status {FILE_CHANGED} after {took:.2f} s: {line[-130:]}"


def interrupted_while_decoding(path: Path) -> str:
    took = []
    for options in ((), STREAMED):
        for delay in (0.013, 0.1):
            for times in (1, 2):
                with ete_run(path, *options, "hello") as process:
                    wait_for_text(process, "stdout")
                    time.sleep(delay)
                    for _ in range(times):
                        process.send_signal(signal.SIGINT)
                        time.sleep(0.005 * (times - 1))
                    took.append(end_of(process, f"{times} x SIGINT")[0])
                    # The second may meet a program that has ended but for the interpreter: shells say 130 of that too.
                    allowed = (INTERRUPTED,) if times == 1 else (INTERRUPTED, -signal.SIGINT)
                    assert process.returncode in allowed, process.returncode
    return f"{len(took)} times, once and twice: status {INTERRUPTED} within {max(took):.2f} s"


def interrupted_while_reading_the_prompt(path: Path) -> str:
    text = path.with_name("prompt.txt")
    text.write_text("x" * 30000, encoding="utf-8")
    took = []
    for delay in (0.05, 0.3):
        with ete_run(path, *STREAMED, "--prompt-file", str(text)) as process:
            wait_for_text(process, "stderr", b"GPU memory")
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            took.append(end_of(process, "SIGINT")[0])
            assert process.returncode == INTERRUPTED, process.returncode
    return f"status {INTERRUPTED} within {max(took):.2f} s"


def interrupted_while_compiling(path: Path) -> str:
    took = []
    for delay in (1.0, 2.0):
        empty = Path(tempfile.mkdtemp(dir=path.parent))
        with ete_run(path, "hello", environment={"ETE_CACHE": str(empty)}) as process:
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            took.append(end_of(process, "SIGINT", 10.0)[0])
            assert process.returncode == INTERRUPTED, process.returncode
    return f"status {INTERRUPTED} within {max(took):.2f} s"


CHECKS: dict[str, Callable[[Path], str]] = {
    check.__name__: check
    for check in (
        launch_fails,
        allocation_refused,
        memory_is_back,
        close_while_a_pass_runs,
        kernel_writes_out_of_bounds,
        file_truncated,
        interrupted_while_decoding,
        interrupted_while_reading_the_prompt,
        interrupted_while_compiling,
    )
}


def run_one(name: str, path: Path) -> int:
    try:
        print(f"ok      {name.replace('_', ' ')}: {CHECKS[name](path)}")
        return 0
    except (AssertionError, EdgeTransformerError, subprocess.TimeoutExpired) as error:
        print(f"FAILED  {name.replace('_', ' ')}: {type(error).__name__}: {error}")
        return 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", choices=CHECKS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model:
        return run_one(arguments.name, arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        gpu = CudaGpu()
        before = gpu.memory_info()[0]
        names = [arguments.name] if arguments.name else list(CHECKS)
        good = run_side_by_side(__file__, [[name, "--model", str(model)] for name in names], LIMIT_S, at_once=1)
        after = gpu.memory_info()[0]
        gpu.close()
    print(f"{'ok' if after == before else 'FAILED':7} memory free after all of it: {(after - before) / MIB:+.1f} MiB")
    return 0 if good and after == before else 1


if __name__ == "__main__":
    sys.exit(main())
