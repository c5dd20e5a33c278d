"""The server beside clients from PyPI, in an environment of their own: `make test-server`."""
