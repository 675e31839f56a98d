"""One measurement of llama.cpp in a process of its own; prints one JSON object. Started by compare_llama_cpp.py.

Runs under the interpreter that has the `llama-cpp-python` package, on that package's low-level functions, so that
nothing but llama.cpp itself is timed: logits for the last row only, the greedy token picked by numpy.
"""

import ctypes
import json
import sys
import time
from functools import cache
from typing import Any


def load_model(path: str) -> Any:
    """The model of a GGUF file as the package's low-level functions take it. Ends the process where there is none."""
    import llama_cpp

    llama_cpp.llama_log_set(_ignore_log(), ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp could not load {path}")
    return model


@cache
def _ignore_log() -> Any:
    """Kept for as long as the process: llama.cpp has its address."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, user_data: None)


def main() -> None:
    task = json.loads(sys.argv[1])
    import llama_cpp
    import numpy as np

    model = load_model(task["model"])
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = task["context"]
    settings.n_batch = settings.n_ubatch = 512
    settings.n_threads = settings.n_threads_batch = task["threads"]
    settings.flash_attn_type = 1 if task["flash_attention"] else 0
    context = llama_cpp.llama_init_from_model(model, settings)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def decode(ids: list[int]) -> int:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(ids))) != 0:
            sys.exit("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, (vocabulary,))))

    def forget() -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

    token = decode(task["short"])
    result = {"first_token_at": time.monotonic(), "first_token": token}
    result["first_peak_bytes"] = peak_bytes()
    if task["full"]:
        for _ in range(8):
            token = decode([token])
        forget()
        start = time.perf_counter()
        decode(task["long"])
        result["prefill_s"] = time.perf_counter() - start
        forget()
        token = decode(task["short"])
        start = time.perf_counter()
        for _ in range(task["decode_tokens"]):
            token = decode([token])
        result["decode_s"] = time.perf_counter() - start
        result["peak_bytes"] = peak_bytes()
    print(json.dumps(result))


def peak_bytes() -> int:
    """Largest resident size of this process so far, mapped file pages included."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    sys.exit("no VmHWM in /proc/self/status")


if __name__ == "__main__":
    main()
