"""Each page of docs/ in an environment that has only what the page says: `python -m tests.pages`."""
