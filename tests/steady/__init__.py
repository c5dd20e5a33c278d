"""The gate's tests where time goes otherwise than on a quiet machine."""
