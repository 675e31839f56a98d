"""The server: OpenAI's HTTP interface over a scheduler, a chat page, metrics.

Knows requests, responses and connections; what runs together and when is the engine's business
(`edge_transformer.engine.scheduler`).
"""
