"""A child program like llamabatch.client.worker in which one call raises once. See tests/long/raising_calls.py."""

import inspect
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path

import llamabatch
from llamabatch.client import worker
from llamabatch.llama import library

VARIABLE = "RAISING_WORKER"
PACKAGE = str(Path(llamabatch.__file__).parent)
NATIVE = "native:"
_LEFT_OUT = ("llama_max_devices", "llama_log_set", "llama_log_get")  # not wrapped: our code takes pointers to them
ERRORS = {error.__name__: error for error in (TypeError, OSError, MemoryError, RecursionError)}


class Fault:
    """A profile function that counts the calls of the package and of llama.cpp, and raises at one of them.

    Attributes:
        is_armed: True while calls are counted.
        seen: number of calls by name.
        fired: True after it has raised.
    """

    def __init__(self):
        self.is_armed = self.fired = False
        self.seen = Counter()
        self.name, self.nth, self.error = "", 0, TypeError
        self.before = lambda: True  # if it returns False, no error is raised

    def arm(self, name="", nth=0, error=TypeError):
        self.name, self.nth, self.error = name, nth, error
        self.seen = Counter()
        self.fired, self.is_armed = False, True

    def __call__(self, frame, event, arg):
        if event == "call" and self.is_armed:
            code = frame.f_code
            # closing a generator resumes it, and no caller could catch an error that this call raises
            if not code.co_flags & inspect.CO_GENERATOR and code.co_filename.startswith(PACKAGE):
                self.count(f"{code.co_filename[len(PACKAGE) + 1 :]}:{getattr(code, 'co_qualname', code.co_name)}")

    def count(self, name):
        self.seen[name] += 1
        if name == self.name and self.seen[name] == self.nth and not self.fired and self.before():
            self.fired = True
            raise self.error("injected")

    def wrap_native(self):
        """Wraps llama.cpp's functions, so that their calls are counted until the process ends."""
        lib = library.load()
        for name in dir(lib):
            function = getattr(lib, name)
            if (
                name.startswith("llama_")
                and name not in _LEFT_OUT
                and callable(function)
                and not isinstance(function, type)
            ):
                setattr(lib, name, self._wrapped(NATIVE + name, function))

    def _wrapped(self, name, function):
        def call(*arguments):
            if self.is_armed:
                self.count(name)
            return function(*arguments)

        return call


def main(fd):
    asked = json.loads(os.environ[VARIABLE])
    fault = Fault()
    fault.wrap_native()
    marker = Path(asked["folder"], "fired")

    def first_time():
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    fault.before = first_time
    unpack = worker.unpack_request

    def armed(packed):  # calls before the first request belong to the load
        if not fault.is_armed:
            fault.arm(asked["name"], asked["nth"], ERRORS[asked["error"]])
        return unpack(packed)

    worker.unpack_request = armed
    threading.setprofile(fault)
    sys.setprofile(fault)
    try:
        worker.main(fd)
    finally:
        sys.setprofile(None)
        fault.is_armed = False
        Path(asked["folder"], "seen.json").write_text(json.dumps(fault.seen))


if __name__ == "__main__":
    main(int(sys.argv[1]))
