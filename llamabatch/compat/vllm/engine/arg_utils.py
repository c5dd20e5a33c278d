"""EngineArgs: the model and the options of an LLMEngine or an LLM."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any

from llamabatch.utils.absent import absent

ABSENT = dict.fromkeys(("add_cli_args", "from_cli_args"), "the options of vLLM's command line are not parsed here")


class _WithAdvice(type):
    """The metaclass of EngineArgs. It gives advice about missing names, because programs look them up on the class."""

    def __getattr__(cls, name: str) -> Any:
        raise absent(cls, name, ABSENT, kind="EngineArgs")


class EngineArgs(metaclass=_WithAdvice):
    """The model and the options of an LLMEngine or an LLM: `LLM(**dataclasses.asdict(args))`.

    Args:
        model: as for LLM.
        **options: as for LLM, which checks them.
    """

    model: str

    def __new__(cls, model: str, **options: Any) -> EngineArgs:
        # vLLM's class has fields with defaults for all options. Here only the given options are fields,
        # because asdict() must return only the caller's options.
        values = {"model": model, **options}
        self: EngineArgs = object.__new__(make_dataclass("EngineArgs", list(values), bases=(cls,), init=False))
        vars(self).update(values)
        return self
