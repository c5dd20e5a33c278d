"""stdout, for tables."""

from __future__ import annotations

from rich.console import Console


class Stdout(Console):
    """Whose reader may leave: that is a BrokenPipeError here, too, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls it while it handles the error
