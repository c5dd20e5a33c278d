"""The processes that a test started, without those of other tests' engines."""

import psutil


class Started:
    """Children of this process that were not there when this was made."""

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))

    def __call__(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if child not in self._before]
