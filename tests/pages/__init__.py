"""`python -m tests.pages` runs each page of docs/ in an environment with only the packages that the page names."""
