"""`llamabatch tune` measures what decides the speed of a model on this machine, chooses, and keeps a profile."""
