"""The ops on the native CPU library: one wrapper per op, a persistent thread pool, instruction sets chosen at run time."""
