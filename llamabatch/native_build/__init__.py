"""Builds llama.cpp with the patches and kernels of native_patches/. Uses only the standard library: it runs first."""
