"""`make test-all`: runs all tests in parts, and remembers the parts that have passed."""
