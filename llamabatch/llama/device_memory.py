"""A program that prints the memory of each GPU as JSON. The program's GPU contexts end with the program.

The last line of its output is `{"CUDA0": [free, total], ...}`, in bytes.
"""

from __future__ import annotations

import json

from llamabatch.llama import devices, library


def main() -> None:
    """Prints the memory of the GPUs."""
    module = library.load()
    print(json.dumps({gpu.name: devices.memory_here(module, gpu) for gpu in devices.devices(module) if gpu.is_gpu}))


if __name__ == "__main__":
    main()
