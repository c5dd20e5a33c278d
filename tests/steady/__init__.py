"""Runs the gate's tests under other timing than on a quiet machine."""
