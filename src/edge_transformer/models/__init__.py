"""What a model is: configuration, capability gate, tensors by role, and the layer written once against ops.Backend."""
