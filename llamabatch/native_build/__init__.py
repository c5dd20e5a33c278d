"""Builds llama.cpp with the patches and kernels of native_patches/. Standard library only: it runs before the rest."""
