"""The ops on the native CPU library: a persistent thread pool, instruction sets chosen at run time."""
