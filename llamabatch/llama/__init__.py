"""The only subpackage that calls llama.cpp. It imports `sampling` and the subpackages below `sampling`."""
