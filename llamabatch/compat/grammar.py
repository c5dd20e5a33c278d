"""LlamaGrammar: a grammar or a JSON schema for the output, under llama_cpp's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llamabatch.errors import SamplingError
from llamabatch.request.structured_outputs import Structure, structure
from llamabatch.utils.checks import reason, show


class LlamaGrammar:
    """The structure of an output, made by one of the class methods.

    A Llama also accepts llama_cpp's LlamaGrammar objects.

    The argument `verbose` of the class methods exists for llama_cpp's sake and changes nothing.

    Attributes:
        form: the structure as in SamplingParams.structured_outputs.
    """

    def __init__(self, form: Structure) -> None:
        self.form = form

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """Makes a LlamaGrammar from llama.cpp's notation (GBNF) or Lark's. Raises SamplingError for other types."""
        return cls(_form({"grammar": grammar}))

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = True) -> LlamaGrammar:
        """Makes a LlamaGrammar from a file. Raises SamplingError if the file cannot be read or is empty."""
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SamplingError(f"the grammar {show(str(file))} cannot be read: {reason(error)}") from error
        return cls.from_string(text, verbose=verbose)

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> LlamaGrammar:
        """Makes a LlamaGrammar from a JSON schema, given as JSON text. Raises SamplingError."""
        return cls(_form({"json": json_schema}))


def _form(given: dict[str, Any]) -> Structure:
    form = structure(given)
    assert form is not None
    return form


def form_of(grammar: object) -> Structure | None:
    """Returns the structure of a LlamaGrammar, ours or llama_cpp's; returns None for None. Raises SamplingError."""
    if grammar is None:
        return None
    if isinstance(grammar, LlamaGrammar):
        return grammar.form
    text = getattr(grammar, "_grammar", None)  # llama_cpp.LlamaGrammar has no public attribute for its text
    if not isinstance(text, str):
        raise SamplingError(f"grammar is {show(grammar)}; give LlamaGrammar.from_string(…) or .from_json_schema(…)")
    return _form({"grammar": text})
