"""A server of the bundled model, for tests that kill it. Arguments: its data folder, and options as name=value."""

import sys

from llamabatch.server.application import engine_config
from llamabatch.server.options import ServerOptions
from llamabatch.server.run import serve

if __name__ == "__main__":
    engine = {name: int(value) for name, _, value in (each.partition("=") for each in sys.argv[2:])}
    options = ServerOptions(port=0, data_dir=sys.argv[1], drain_s=5)
    serve(engine_config("tiny", engine), options, lambda urls: print(urls[0], flush=True))
