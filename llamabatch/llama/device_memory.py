"""Program that writes the memory of each GPU as JSON, and ends: its contexts on them end with it.

Its last line is `{"CUDA0": [free, total], ...}`, in bytes.
"""

from __future__ import annotations

import json

from llamabatch.llama import devices, library


def main() -> None:
    """Runs the program."""
    module = library.load()
    print(json.dumps({gpu.name: devices.memory_here(module, gpu) for gpu in devices.devices(module) if gpu.is_gpu}))


if __name__ == "__main__":
    main()
