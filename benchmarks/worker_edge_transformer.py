"""One measurement of this engine in a process of its own; prints one JSON object. Started by compare_llama_cpp.py.

The same task, and the same result, as in worker_llama_cpp.py. The KV cache has its default type (bf16), as llama.cpp's
has (f16).
"""

import json
import sys
import time


def main() -> None:
    task = json.loads(sys.argv[1])
    from edge_transformer import LLM
    from edge_transformer.engine.chunk import Chunk

    with LLM(task["model"], context_length=task["context"], threads=task["threads"]) as llm:
        engine = llm.engine

        def decode(sequence, token: int) -> int:
            result = engine.step([Chunk(sequence, [token], "decode", "last")])
            return int(result.logits()[0].argmax())

        sequence = engine.new_sequence()
        token = int(engine.prefill(sequence, task["short"]).argmax())
        result = {"first_token_at": time.monotonic(), "first_token": token}
        result["first_peak_bytes"] = peak_bytes()
        if task["full"]:
            for _ in range(8):
                token = decode(sequence, token)
            sequence.truncate(0)
            start = time.perf_counter()
            engine.prefill(sequence, task["long"])
            result["prefill_s"] = time.perf_counter() - start
            sequence.truncate(0)
            token = int(engine.prefill(sequence, task["short"]).argmax())
            start = time.perf_counter()
            for _ in range(task["decode_tokens"]):
                token = decode(sequence, token)
            result["decode_s"] = time.perf_counter() - start
            result["peak_bytes"] = peak_bytes()
        sequence.close()
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
