"""`make test-vulkan`: tests engines on Vulkan. If the machine has no driver, they get one that computes on the CPU."""
