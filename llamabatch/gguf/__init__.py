"""Model files as data: finds, downloads, reads and validates them without llama.cpp. Imports `request` and `utils`."""
