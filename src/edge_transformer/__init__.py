"""EdgeTransformerEngine: language models bigger than the GPU memory, with the right answer."""
