"""Build of llama.cpp: applies patches and kernels of native_patches/. Uses only the standard library."""
