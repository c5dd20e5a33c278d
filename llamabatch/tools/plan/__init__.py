"""`llamabatch plan`: computes which engines fit on this machine, before anything is loaded."""
