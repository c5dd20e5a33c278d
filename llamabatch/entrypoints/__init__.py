"""LLM and AsyncLLM: from prompts and conversations to requests, and from outputs back to the caller. Imports
`monitor` and what stands below it.
"""
