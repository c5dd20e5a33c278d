"""Helpers that know nothing of inference: checks, fork-safe lifetimes, histograms, formats, plotting, console, atomic
files. Imports only `errors`.
"""
