"""Ours and its peers on one machine: `make bench`, `make bench-quick`, `make bench-ab`. See docs/benchmarks.md."""
