"""Runs llama.cpp's own server tests against `llamabatch serve`. They start a program of ours named llama-server."""
