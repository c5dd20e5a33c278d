"""What fits, before anything is loaded: `llamabatch plan`, and what an engine asks before it loads."""
