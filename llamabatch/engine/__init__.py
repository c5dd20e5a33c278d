"""The step loop over one model: Engine, parallel sampling, embedding, validation, stats. Imports `llama` and the
packages below it.
"""
