"""`llamabatch plan` says what fits before anything is loaded."""
