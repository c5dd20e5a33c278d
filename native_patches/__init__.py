"""Patches and kernels for llama.cpp, and the developer's programs that build with them. No wheel holds the programs."""
