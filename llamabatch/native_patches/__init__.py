"""Patches to llama.cpp and the programs that build them. Standard library only: they run before all else is there."""
