"""What `make test` runs, and how: the tests that are not slow, on a worker for each core."""
