"""LLM and AsyncLLM: prompts and conversations become requests, and outputs go back to the caller. Imports `monitor` and
the rooms below it.
"""
