"""`llamabatch plan`: the engines that fit on this machine, computed before anything is loaded."""
