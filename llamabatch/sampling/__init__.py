"""Samples tokens from logits: native and numpy samplers, sampler chain, masks, grammars and draft verification. This
package does not use llama.cpp. It imports `planning` and the packages below `planning`."""
