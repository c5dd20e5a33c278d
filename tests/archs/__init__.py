"""Tests every architecture that llama.cpp can write, with small models of random weights."""
