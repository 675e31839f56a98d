"""The seam between the mathematics of a model and the executors: contracts of ops, the Backend protocol, the oracle."""
