"""`make test-server`: tests the server with clients from PyPI, in an environment of their own."""
