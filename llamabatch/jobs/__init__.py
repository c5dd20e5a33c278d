"""A long list of rows, run unattended: reading it, running it, writing what comes of it."""
