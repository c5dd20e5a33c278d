"""llama.cpp's own server tests, run against `llamabatch serve`; a program named llama-server stands between them."""
