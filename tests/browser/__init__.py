"""`make test-browser`: tests the server's page in a browser, in an environment of their own."""
