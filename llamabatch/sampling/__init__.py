"""Logits and parameters to tokens: native and numpy samplers, sampler chain, masks, grammars, draft verification;
without llama.cpp. Imports `planning` and what stands below it.
"""
