"""`python -m llamabatch` is the command line."""

from llamabatch.cli import main

main()
