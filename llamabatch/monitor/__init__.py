"""Watching engines: snapshots every so often, the machine beside them, metrics files, `llamabatch top`."""
