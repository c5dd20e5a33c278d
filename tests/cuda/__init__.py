"""A build for CUDA on a machine that need have no GPU and no driver: `make cuda-build`."""
