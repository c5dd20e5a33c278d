"""Decides what a step computes: waiting queue, policies, KV slots, prefix cache, chunked prefill, drafts. Pure Python.

Imports `request`, `gguf` and `utils`. `scheduler.Scheduler` decides a step and applies its results; `output` has the
types that the scheduler and a model runner exchange.
"""
