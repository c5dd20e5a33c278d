"""A model file as data: find it, fetch it, read it, validate it, without llama.cpp. Imports `request` and `utils`."""
