"""HTTP without a model: errors, keys, limits, counts and logs of all requests."""
