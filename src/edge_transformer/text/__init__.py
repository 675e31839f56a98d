"""Tokens to text and back: tokenizers, chat templates, streaming detokenization, stop strings."""
