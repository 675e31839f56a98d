"""Compiles the grammar of its standard input and ends; is ended when that takes too long or too much memory.

    python -m edge_transformer.server.grammar_trial SECONDS BYTES < GRAMMAR

Started by grammar_bounds.py, which reads BEGUN and the exit status. Imports little: a request waits for it.
"""

from __future__ import annotations

import os
import resource
import sys

import llguidance

BEGUN = "begun"


class _Bytes:
    """A vocabulary of single bytes: what takes long is not the model's tokens."""

    eos_token_id = 0
    bos_token_id = None
    special_token_ids = (0,)
    tokens = tuple(bytes([value]) for value in range(256))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _compile(seconds: int, most_bytes: int) -> None:
    """Raises nothing for a grammar that is wrong: it is refused, with the reason, where it is compiled for use."""
    grammar = sys.stdin.buffer.read().decode()
    os.nice(19)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds += int(used.ru_utime + used.ru_stime) + 1  # the kernel counts whole ones
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, most_bytes)):
        limit = resource.getrlimit(kind)[1]
        lower = most if limit == resource.RLIM_INFINITY else min(most, limit)
        resource.setrlimit(kind, (lower, lower))
    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=256, eos_token=[0])
    print(BEGUN, flush=True)
    llguidance.LLMatcher(tokens, grammar, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False))


if __name__ == "__main__":
    _compile(int(sys.argv[1]), int(sys.argv[2]))
