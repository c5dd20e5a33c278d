"""Benchmarks of llamabatch and its peers: `make bench`, `make bench-quick`, `make bench-ab`. See docs/benchmarks.md."""
