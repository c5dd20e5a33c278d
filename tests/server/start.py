"""Serves on a port, with options as JSON: python start.py 8000 '{"model": "tiny"}'."""

import json
import sys

import uvicorn

from llamabatch.server import app

if __name__ == "__main__":
    port, options = int(sys.argv[1]), json.loads(sys.argv[2])
    uvicorn.run(app(**options), host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=3)
