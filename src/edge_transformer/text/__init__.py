"""Tokens to text and back: tokenizers, chat templates, streaming detokenization, stop strings.

Knows files of a model (`edge_transformer.formats`), not models, executors or the engine. `load.load_text` is the door.
"""
