"""Decides what a step computes: queue, policies, KV slots, prefix cache, chunked prefill, drafts; pure Python.
Imports `request`, `gguf` and `utils`.
"""
