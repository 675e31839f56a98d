"""Tiny random models that are able to fail: their configurations, weights and files."""
