"""LLM and AsyncLLM: they turn prompts and conversations into requests, and return the outputs to the caller. Imports
`monitor` and the packages below it.
"""
