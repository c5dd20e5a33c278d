"""The tests; `make test` runs them."""
