"""The ops on a GPU: hand-written CUDA kernels compiled on the user's machine, one arena, streams and events."""
