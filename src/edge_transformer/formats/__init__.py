"""Bytes on disk to named tensors: safetensors, GGUF, and weight formats as planes. No knowledge of models."""
