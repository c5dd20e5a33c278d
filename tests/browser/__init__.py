"""The page of the server in a browser, with an environment of its own: `make test-browser`."""
