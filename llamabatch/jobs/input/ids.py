"""The ids of rows, stored in little memory, and the checks of ids before the first row runs."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from llamabatch.errors import ConfigError, PromptError
from llamabatch.jobs.input import jsonl, tables
from llamabatch.jobs.input.jsonl import Problem
from llamabatch.jobs.input.lines import id_of, is_openai
from llamabatch.jobs.input.sources import DAMAGED, Source
from llamabatch.jobs.input.templates import as_text
from llamabatch.jobs.rows import OWN_IDS, Bits, ReadOptions
from llamabatch.utils.checks import present, show

_MASK = 2**64 - 1


def check_own_ids(sources: Sequence[Source], options: ReadOptions) -> None:
    """Checks the column "id" or "custom_id" of each table. Unless an option names another column, this column has the
    ids. All rows up to the limit are checked before the first row runs.

    Raises:
        ConfigError: a value is not an id, or occurs twice in the tables of the job.
    """
    ids, places, number = Ids(), [], 0
    for source in sources:
        column = tables.own_id_column(source, options)
        if column is None:
            continue
        places.append((number, source.name))
        for row, value in enumerate(tables.values_of(source, options, column), 1):
            if not isinstance(value, Problem):
                holder = None
                why = _unusable(value)
                if why is None and (holder := ids.claim(str(value), number)) is not None:
                    start, name = next(each for each in reversed(places) if each[0] <= holder)
                    why = f"the id of {name}, row {holder - start + 1}, already"
                if why is not None:
                    raise ConfigError(
                        f"{source.name}, row {row}: column {show(column)} holds {show(value)}, {why}; name the column "
                        "of the ids (--id-column NAME), or give --id-column '' for the numbers of the rows"
                    )
            number += 1
            if number == options.limit:
                return


def check_ids_of_lines(sources: Sequence[Source], options: ReadOptions) -> None:
    """Checks the ids of all rows up to the limit in files of lines, before any row runs. In files after a table or a
    stream, the numbers of lines are not known, so only the form of ids is checked. Reader finds ids that occur twice.

    Raises:
        ConfigError: a value is not an id, or equals the number of a line without an id.
    """
    ids, starts, number = Ids(), list[tuple[int, str]](), 0
    has_ids, knows_numbers = False, True
    for source in () if options.id_column else sources:
        if source.kind != "jsonl" or source.is_stream:
            knows_numbers = False
            continue
        starts.append((number, source.name))
        try:
            with source.open() as stream:
                for record in jsonl.objects(source.name, stream, options.max_line_bytes):
                    line = record.line if isinstance(record, Problem) else record
                    if line is not None:
                        line = present(line)
                        has_ids |= any(name in line for name in OWN_IDS)
                    if line is not None or not has_ids:
                        _claim_of_line(ids if knows_numbers else None, line or {}, number, starts)
                    number += 1
                    if number == options.limit and knows_numbers:
                        return
        except (*DAMAGED, OSError):  # the error is reported when the rows are read
            knows_numbers = False


def _claim_of_line(ids: Ids | None, line: Mapping[str, Any], number: int, starts: Sequence[tuple[int, str]]) -> None:
    """Claims the id of a line, or its number if the line has no id. Raises ConfigError.

    Args:
        ids: the ids so far; None: the numbers of rows are not known, so only the form of the id is checked.
        starts: for each file so far, the number of its first row, and its name.
    """
    try:
        own = id_of(line)
    except PromptError as error:
        cure = "if it is data, name the field of the ids (--id-column NAME)"
        raise ConfigError(f"{_place(starts, number)}: {error}; {cure}") from error
    if ids is None or (own is None and is_openai(line)):
        return
    holder = ids.claim_number(number) if own is None else ids.claim_numeral(str(own), number)
    if holder is not None:
        bare, named = (number, holder) if own is None else (holder, number)
        raise ConfigError(
            f"{_place(starts, bare)} has no id and gets its number, {bare}, as its id, but {_place(starts, named)} has "
            "this id; give each line an id, or name another field of ids (--id-column NAME)"
        )


def _place(starts: Sequence[tuple[int, str]], number: int) -> str:
    start, name = next(each for each in reversed(starts) if each[0] <= number)
    return f"{name}, line {number - start + 1}"


def _unusable(value: Any) -> str | None:
    """Returns the reason why a value cannot be an id; None: the value is an id."""
    if value is None or value == "":
        return "which is no id"
    if isinstance(value, (bool, float, list, dict, tuple)):
        return "which is no id; an id is a text or a whole number"
    try:
        id_of({"id": value if isinstance(value, int) else as_text(value)})
    except PromptError as error:
        return f"which is no id ({error})"
    return None


class Ids:
    """A compact table of the ids of millions of rows. Each id leads to the number of its row.

    An id is stored as its 64-bit Python hash, in a table with open addressing. A slot of the table takes 16 bytes.
    Because some slots are free, an id takes 24 to 48 bytes. Each process has its own hash key. The probability that two
    of a million ids have equal hashes is 1 in 3.7e7. If a row has no id, its number is its id. One bit is stored for
    such a row.
    """

    def __init__(self) -> None:
        self._keys = array("Q", bytes(8 * 1024))  # 0 marks a free slot
        self._numbers = array("Q", bytes(8 * 1024))
        self._used = 0
        self._automatic = Bits()  # rows without an id of their own, which have their number as the id
        self._explicit_numerals = False

    def claim(self, identity: str, number: int) -> int | None:
        """Gives an id to a row. Returns the number of the row that has the id already, or None."""
        if _is_numeral(identity):
            self._explicit_numerals = True
            value = int(identity)
            if value in self._automatic:
                return value
        key = hash(identity) & _MASK or 1
        slot = self._slot(key)
        if self._keys[slot]:
            return self._numbers[slot]
        self._keys[slot], self._numbers[slot] = key, number
        self._used += 1
        if self._used * 3 > len(self._keys) * 2:
            self._grow()
        return None

    def claim_numeral(self, identity: str, number: int) -> int | None:
        """Gives a row its id if the id is a numeral, such as "7". If the id equals the number of an earlier row
        without an id of its own, returns this number, otherwise None."""
        if _is_numeral(identity) and (holder := self.claim(identity, number)) is not None:
            return holder if int(identity) in self._automatic else None
        return None

    def claim_number(self, number: int) -> int | None:
        """Gives a row without an id its number as the id. If an earlier row has this id, returns the number of that
        row, otherwise None."""
        if self._explicit_numerals:
            slot = self._slot(hash(str(number)) & _MASK or 1)
            if self._keys[slot]:
                return self._numbers[slot]
        self._automatic.add(number)
        return None

    def _slot(self, key: int) -> int:
        """Returns the slot of a key, or the free slot for a new key."""
        keys, mask = self._keys, len(self._keys) - 1
        slot = key & mask
        while keys[slot] and keys[slot] != key:
            slot = slot + 1 & mask
        return slot

    def _grow(self) -> None:
        keys, numbers = self._keys, self._numbers
        self._keys = array("Q", bytes(16 * len(keys)))
        self._numbers = array("Q", bytes(16 * len(keys)))
        for key, number in zip(keys, numbers, strict=True):
            if key:
                slot = self._slot(key)
                self._keys[slot], self._numbers[slot] = key, number


def _is_numeral(identity: str) -> bool:
    """Returns True for an id that is written like a row's number."""
    return len(identity) < 19 and identity.isascii() and identity.isdigit() and (identity == "0" or identity[0] != "0")
