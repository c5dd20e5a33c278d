"""`make cuda-build`: a build for CUDA. The machine needs no GPU and no driver."""
