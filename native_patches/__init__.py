"""Patches and kernels for llama.cpp, and programs that build with them. Wheels do not contain the programs."""
