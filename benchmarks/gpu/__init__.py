"""What a GPU is measured with: `make gpu-pack` packs it, and `make gpu-check` runs from there without a network."""
