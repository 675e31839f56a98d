"""Who, where, when: weights by segment, KV tiles, sequences, passes, sampling, the engine object."""
