"""Engines on Vulkan, with a build and a driver of their own where the machine has none: `make test-vulkan`."""
