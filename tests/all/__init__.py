"""`make test-all`: all tests, in parts that are remembered when they have passed."""
