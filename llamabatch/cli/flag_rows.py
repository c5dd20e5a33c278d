"""Rows of a table of another server's flags: each says what its flags mean here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Args = tuple[str, ...]
TRUE = ("on", "enabled", "true", "1")  # common/arg.cpp, is_truthy and is_falsey
FALSE = ("off", "disabled", "false", "0")
ANY: Args = ("*",)
MANY = -1  # one value or more, up to the next flag
LLAMA, VLLM = "llama-server", "vLLM"


@dataclass(frozen=True)
class Row:
    """Flags of one meaning.

    Attributes:
        program: LLAMA or VLLM.
        names: its names. negatives: names that turn it off.
        env: environment variable of llama-server; "": none.
        takes: number of values; MANY: one or more.
        args: arguments of ours for a value; None: no arguments.
        on, off: those of a flag without a value.
        note: said when the flag is given; "": nothing, as it asks for what happens anyway.
        cure: said where a value is refused. fine: values that are not; ANY: none is refused.
    """

    program: str
    names: Args
    negatives: Args = ()
    env: str = ""
    takes: int = 0
    args: Callable[[str], Args] | None = None
    on: Args = ()
    off: Args = ()
    note: str = ""
    cure: str = ""
    fine: Args = ()


def as_option(option: str, skip: Args = ()) -> Callable[[str], Args]:
    """The value as it is, for an option of ours; none for values that ask for what happens anyway."""
    return lambda value: () if value in skip else (option, value)


NO_MEDIA = "models take text alone here"
NO_TOOLS = "tools of the server's own are not run here; clients run theirs"
