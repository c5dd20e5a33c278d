"""The gate: `make test` runs the tests that are not slow, with one worker for each core."""
