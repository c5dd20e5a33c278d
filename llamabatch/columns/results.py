"""The results of rows, and the columns made from the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamabatch.columns.frames import Column
from llamabatch.columns.schema import INTEGER, STRING, Kind, Schema
from llamabatch.errors import ConfigError, InputError
from llamabatch.request.outputs import FinishReason, RequestOutput
from llamabatch.utils.checks import nearest, show

_KINDS = {name: Kind(STRING) for name in ("text", "reasoning", "n_tokens", "finish_reason", "error")}
_KINDS["n_tokens"] = Kind(INTEGER)
OUTPUTS = tuple(_KINDS)
GENERATED_TEXT = "generated_text"  # the default column, named as in Hugging Face and Ray


@dataclass(frozen=True)
class Result:
    """The result of one row. If the row failed, all fields except `error` are None.

    Attributes:
        text, reasoning, finish_reason, error: as in RequestOutput.
        n_tokens: the number of generated tokens.
    """

    text: str | None = None
    reasoning: str | None = None
    n_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> Result:
        """Makes the result from an output of the engine."""
        reason = output.finish_reason
        if output.error is not None or reason in (FinishReason.ERROR, FinishReason.ABORT):
            return cls(error=output.error or "the request was aborted")
        return cls(output.text, output.reasoning, len(output.token_ids), reason.value)


class OutputColumns:
    """Makes columns from results.

    Args:
        output: the name of the text column, or a mapping from the fields of a result (OUTPUTS) to column names. None:
            GENERATED_TEXT without a schema, and no text column with a schema.
        schema: the schema of the texts. Its properties become columns, too.

    Attributes:
        names: the names of the columns, in order.

    Raises:
        ConfigError: a name is wrong, or occurs twice.
    """

    def __init__(self, output: str | Mapping[str, str] | None, schema: Schema | None) -> None:
        if output is None:
            named = {} if schema is not None else {"text": GENERATED_TEXT}
        elif isinstance(output, Mapping):
            named = dict(output)
        else:
            named = {"text": output}
        for source, name in named.items():
            if source not in OUTPUTS:
                raise ConfigError(f"output has {show(source)}{nearest(str(source), OUTPUTS)}")
            if not isinstance(name, str) or not name:
                raise ConfigError(f"output has {show(name)} for {source}; give the name of a column")
        error = named.pop("error", "error")
        self._named, self._schema, self._error = named, schema, error
        fields = () if schema is None else tuple(field.name for field in schema.fields)
        self.names = (*named.values(), *fields, error)
        for name in self.names:
            if self.names.count(name) > 1:
                cure = "output={'error': 'another name'}" if name == error else "another name in output"
                raise ConfigError(f"two new columns would have the name {show(name)}; give {cure}")

    def check(self, columns: Sequence[str]) -> None:
        """Raises InputError if a column of the batch has the name of a new column."""
        for name in self.names:
            if name in columns:
                key = next((key for key, each in self._named.items() if each == name), "error")
                is_field = name != self._error and name not in self._named.values()
                cure = "rename the column" if is_field else f"give output={{{key!r}: 'another name'}}, or rename it"
                raise InputError(f"the batch has a column {show(name)} already; {cure}")

    def of(self, results: Sequence[Result]) -> list[Column]:
        """Returns the columns, with one value for each result."""
        found = list(results)
        columns: dict[str, list[Any]] = {}
        if self._schema is not None:
            columns = {field.name: [] for field in self._schema.fields}
            nothing = dict.fromkeys(columns)
            for index, result in enumerate(found):
                values: Mapping[str, Any] = nothing
                if result.error is None:
                    try:
                        values = self._schema.values(result.text or "")
                    except ValueError as error:
                        found[index] = Result(**{**vars(result), "error": _reason(result, error)})
                for name, value in values.items():
                    columns[name].append(value)
        made = [Column(name, _KINDS[key], [getattr(each, key) for each in found]) for key, name in self._named.items()]
        if self._schema is not None:
            made += [Column(each.name, each.kind, columns[each.name]) for each in self._schema.fields]
        return [*made, Column(self._error, _KINDS["error"], [each.error for each in found])]


def _reason(result: Result, error: ValueError) -> str:
    if result.finish_reason == FinishReason.LENGTH.value:
        return f"{error}; it was cut after {result.n_tokens} tokens: raise max_tokens"
    return str(error)
