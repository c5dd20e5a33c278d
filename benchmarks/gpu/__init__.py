"""Programs that measure a GPU: `make gpu-pack` bundles them, and `gpu-check` runs from the bundle without a network."""
