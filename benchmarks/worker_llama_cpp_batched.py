"""Decode of several sequences at once by llama.cpp, as its server does it; prints one JSON object.

Started by compare_batched_decode.py under the interpreter that has the `llama-cpp-python` package, whose low-level
functions are used: one llama_decode with one token of every sequence, logits for each, the greedy token by numpy.
"""

import json
import sys
import time

from worker_llama_cpp import load_model


def main() -> None:
    task = json.loads(sys.argv[1])
    import llama_cpp
    import numpy as np

    model = load_model(task["model"])
    streams = len(task["prompts"])
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = task["context"] * streams
    settings.n_batch = settings.n_ubatch = 512
    settings.n_seq_max = streams
    settings.kv_unified = task["unified"]
    settings.n_threads = settings.n_threads_batch = task["threads"]
    settings.flash_attn_type = 1 if task["flash_attention"] else 0
    context = llama_cpp.llama_init_from_model(model, settings)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(512, 0, streams)

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows: token, position, sequence, whether its logits are asked."""
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, asked) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = asked
        if llama_cpp.llama_decode(context, batch) != 0:
            sys.exit("llama_decode failed")

    def likeliest(index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, index)
        return int(np.argmax(np.ctypeslib.as_array(logits, (vocabulary,))))

    tokens = []
    for sequence, prompt in enumerate(task["prompts"]):
        decode([(token, position, sequence, position == len(prompt) - 1) for position, token in enumerate(prompt)])
        tokens.append(likeliest(len(prompt) - 1))
    position = len(task["prompts"][0])
    for step in range(-4, task["tokens"]):
        if step == 0:
            start, cpu = time.perf_counter(), time.process_time()
        decode([(token, position, sequence, True) for sequence, token in enumerate(tokens)])
        tokens = [likeliest(index) for index in range(streams)]
        position += 1
    print(json.dumps({"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}))


if __name__ == "__main__":
    main()
