"""Reads the inputs of a job as rows with numbers and ids: one row at a time, for one shard, up to the limit."""

from __future__ import annotations

import copy
import os
import queue
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from llamabatch.chat.messages import Conversation
from llamabatch.errors import ConfigError, InputError
from llamabatch.jobs.input import jsonl, lines, tables
from llamabatch.jobs.input.ids import Ids, check_ids_of_lines, check_own_ids
from llamabatch.jobs.input.jsonl import Filled, Problem, Record
from llamabatch.jobs.input.lines import Overlay, ParsedLine, id_of
from llamabatch.jobs.input.sources import DAMAGED, Source
from llamabatch.jobs.input.tables import RowLines
from llamabatch.jobs.input.total import Seen
from llamabatch.jobs.rows import ALL, OWN_IDS, BadRow, ReadOptions, Row
from llamabatch.media.parts import has_media, placed
from llamabatch.utils.checks import present, show
from llamabatch.utils.paths import absolute

_ROWS_AHEAD = 64
_PLAIN = ReadOptions()

T = TypeVar("T")


def _never(number: int) -> bool:
    return False


def read(
    sources: Sequence[Source], options: ReadOptions | None = None, is_done: Callable[[int], bool] = _never
) -> Reader:
    """Returns a Reader of all rows that are not done."""
    reader = Reader(sources, options)
    reader.skip(is_done)
    return reader


class Reader(Iterator[Row | BadRow]):
    """The rows of all inputs, in order, read on demand. Memory holds one line at a time, and a few bytes for each id.

    docs/rows.md describes the lines of JSONL. A line that cannot be run becomes a BadRow. A damaged compressed or
    Parquet file ends with a BadRow, and the next file follows. Every line claims its id, even a bad or skipped line. A
    later line with the same id becomes a BadRow without an id. A line without an id has its number as its id.

    Attributes:
        seen: the progress of reading. Other threads may read this attribute.

    Raises, from the constructor:
        ConfigError: the template, or a column of ids, parameters or kept values, does not fit a table's columns. A
            table's column "id" does not hold ids. An id in a file of lines is invalid, or equals the number of a line
            without an id. The task, the system message or params_from is given, but no template makes prompts. A kept
            column has the name of one of the output's own columns.
        SetupError: the packages that read a Parquet or Excel file are not installed.
        InputError: the content of a file does not fit its name, or is UTF-16.
    From iteration:
        InputError: the disk fails in the middle of a file. Earlier rows are valid. A later run reads the inputs again.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        options: ReadOptions | None = None,
        taken: Collection[str] = (),
        read_line: Callable[[Mapping[str, Any]], ParsedLine] | None = None,
    ) -> None:
        """Args:
        sources: the inputs from sources.find.
        options: the rules of reading; None: the defaults.
        taken: names of the output's own columns, which no kept column may have.
        read_line: reads a line of OpenAI's batch format for a service; raises InputError. None: there is no service.
        """
        self._sources = sources
        self._options = options or ReadOptions()
        self._is_done: Callable[[int], bool] = _never
        self._ids = Ids()
        self._starts: tuple[int, ...] = ()  # for each opened source, the number of its first row
        self._taken = frozenset(taken)
        _check_wanted(sources, self._options)
        # Tables may keep "id" here, because `_check` compares `keep` with the id column of each table.
        has_lines = any(source.kind == "jsonl" for source in sources)
        tables.check_kept(self._options, self._taken, id_column=None if has_lines else "id")
        _check(sources, self._options, self._taken)
        check_own_ids(sources, self._options)
        of_lines = self._options
        if of_lines.prompt is None and any(source.kind != "jsonl" for source in sources):
            # `template` applies only to tables; lines of JSON among the inputs hold their own prompts
            own: dict[str, Any] = {"image_columns": None, "audio_columns": None, "task": "completion"}
            of_lines = replace(of_lines, template=None, system=None, id_column=None, params_from=None, **own)
        of_lines = replace(of_lines, id_column=of_lines.id_column or None)  # "" has a meaning for tables only
        changes_lines = of_lines.has_template or of_lines.id_column or of_lines.keep
        self._lines = RowLines("lines of JSON", of_lines, self._taken) if changes_lines else None
        self._data = frozenset() if self._lines is None else self._lines.used
        self._overlay = Overlay(self._options.params)
        if read_line is None:  # a service needs no check, because a bad line gets an error as its answer
            check_ids_of_lines(sources, of_lines)
        self._read_line = read_line or self._read_openai
        self._media = read_line is None  # the users of a service must not read files of this machine
        self._sizes = [source.size for source in sources]
        # If lines hold their own ids, an unreadable line has no id. Otherwise the number of the line is its id.
        self._lines_have_ids = of_lines.id_column is not None
        self.seen = Seen()
        self._rows = self._read()

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Row | BadRow:
        return next(self._rows)

    def skip(self, is_done: Callable[[int], bool]) -> None:
        """Makes the reader leave out rows for which `is_done` is true. The ids of these rows stay claimed."""
        self._is_done = is_done

    def again(self) -> Reader:
        """Returns a reader that starts at the first row again. The files are not checked a second time."""
        other = copy.copy(self)
        other._ids, other._starts, other.seen = Ids(), (), Seen()
        other._rows = other._read()
        return other

    def close(self) -> None:
        """Closes the file that is being read."""
        self._rows.close()

    def _read(self) -> Generator[Row | BadRow, None, None]:
        options = self._options
        number = 0
        for source, size in zip(self._sources, self._sizes, strict=True):
            self._starts += (number,)
            for record in self._records(source):
                share = None if size is None or source.has_columns else source.share(size)
                self.seen = Seen(self._starts, number + 1, share)
                skipped = not options.wants(number) or self._is_done(number)
                row = self._row(number, record, skipped)
                if row is not None:
                    yield row
                number += 1
                if number == options.limit:  # the limit is checked before the loop waits for another line
                    break
            if number == options.limit:
                break
        self.seen = Seen(self._starts, number, ended=True)

    def _records(self, source: Source) -> Iterator[Record]:
        """Yields the record in each line or row of one input. A damaged input ends with a Problem."""
        try:
            if source.has_columns:
                yield from tables.column_rows(source, self._options, self._taken)
                return
            with source.open() as stream:
                if source.kind == "jsonl":
                    objects = jsonl.objects(source.name, stream, self._options.max_line_bytes)
                    yield from objects if self._lines is None else map(self._filled, objects)
                else:
                    yield from tables.text_rows(source, stream, self._options, self._taken)
        except DAMAGED as error:
            yield Problem(f"the compressed file is damaged, and nothing can be read from here on: {error}")
        except OSError as error:
            raise InputError(f"{source.name} cannot be read: {error.strerror or error}") from error

    def _filled(self, record: Mapping[str, Any] | Problem) -> Record:
        """Applies the template to a line of JSON and adds the kept fields, as the options say."""
        assert self._lines is not None
        if isinstance(record, Problem):
            return record
        if self._options.keep == ALL and any(name in self._taken for name in record):
            try:
                tables.check_kept(self._options, self._taken, [name for name in record if name not in OWN_IDS])
            except ConfigError as error:
                return Problem(str(error), record)
        return self._lines.line(record)

    def _row(self, number: int, record: Record, skipped: bool) -> Row | BadRow | None:
        """Returns the row of a record; None: the row is skipped, but its id is claimed."""
        line = record.line if isinstance(record, (Problem, Filled)) else record
        is_line = self._sources[len(self._starts) - 1].kind == "jsonl"
        if line is not None:
            line = present(line)
            self._lines_have_ids |= is_line and any(name in line for name in OWN_IDS)
        elif is_line and not self._lines_have_ids:
            line = {}
        kept = record.kept if isinstance(record, (Problem, Filled)) else None
        own_id, error = None, None
        if line is not None:
            try:
                own_id, error = self._claim(line, number)
            except InputError as refusal:
                error = str(refusal)
        if skipped:
            return None
        if isinstance(record, Problem):
            error = record.error
        openai = line is not None and lines.is_openai(line)
        if error is None:
            assert line is not None
            try:
                parsed = self._parsed(line, openai)
                assert own_id is not None
                options = parsed.options
                if parsed.task == "chat" and self._options.chat_template is not None:
                    options = replace(options, template=self._options.chat_template)
                return Row(
                    *(number, own_id, parsed.task, parsed.prompt, parsed.params, options),
                    *(openai, parsed.model, self._place(number), kept, parsed.form),
                )
            except InputError as refusal:
                error = str(refusal)
        place = self._place(number)
        return BadRow(number, own_id, f"{place}: {error}", openai, place, kept)

    def _parsed(self, line: Mapping[str, Any], openai: bool) -> ParsedLine:
        """Returns the request in a line. Raises InputError."""
        if openai:
            return self._read_line(line)
        parsed = lines.parse_plain(line, self._overlay, self._data, media=self._media)
        path = self._sources[len(self._starts) - 1].path
        if path is None or parsed.task != "chat" or not has_media(parsed.prompt):
            return parsed
        return replace(parsed, prompt=placed(cast("Conversation", parsed.prompt), os.path.dirname(absolute(path))))

    def _read_openai(self, line: Mapping[str, Any]) -> ParsedLine:
        return lines.parse_openai(line, self._overlay)

    def _claim(self, line: Mapping[str, Any], number: int) -> tuple[str | int | None, str | None]:
        """Claims the id of a line. Returns (id, None), or (None, the reason why the row gets no id)."""
        own = id_of(line)
        if own is not None:
            holder = self._ids.claim(str(own), number)  # a text, because many programs treat 5 and "5" as one id
            return (own, None) if holder is None else (None, f"the id {str(own)!r} is taken by {self._place(holder)}")
        if lines.is_openai(line):
            return None, None  # the parser refuses this line, because a batch line needs a custom_id
        holder = self._ids.claim_number(number)
        if holder is None:
            return str(number), None
        return None, f"this line has no id, and its number, {number}, is the id of {self._place(holder)}"

    def _place(self, number: int) -> str:
        """Returns the place of a row: "prompts.jsonl, line 7". Each line of a file is a row, so the row's number gives
        the line."""
        index = len(self._starts) - 1
        while self._starts[index] > number:
            index -= 1
        source = self._sources[index]
        unit = {"jsonl": "line", "txt": "prompt"}.get(source.kind, "row")
        return f"{source.name}, {unit} {number - self._starts[index] + 1}"


def _check_wanted(sources: Sequence[Source], options: ReadOptions) -> None:
    """Raises ConfigError if an option needs a template or a table, but there is none."""
    if options.has_template or any(source.kind != "jsonl" for source in sources):
        return
    for name in ("system", "task", "params_from"):
        if getattr(options, name) != getattr(_PLAIN, name):
            raise ConfigError(
                f"{name} is {show(getattr(options, name))}, which needs a table or a "
                "template, as --prompt '{{ question }}'; without a template each line of JSON has its own kind of "
                "request"
            )


def _check(sources: Sequence[Source], options: ReadOptions, taken: Collection[str]) -> None:
    """Raises the errors of Reader for a file that is wrong as a whole, before the first row runs."""
    for source in sources:
        if source.has_columns:
            tables.check_columns(source, options, taken)
        elif not source.is_stream:
            try:
                with source.open() as stream:
                    if source.kind == "jsonl":
                        jsonl.check(source.name, stream, named=source.says_lines)
                    else:
                        tables.check_text(source, stream, options, taken)
                if source.kind == "jsonl" and options.keep == ALL:
                    _check_first_line(source, options, taken)
            except DAMAGED:  # the error is reported when the rows are read
                continue
        elif source.kind != "jsonl":
            tables.check_template(options)


def _check_first_line(source: Source, options: ReadOptions, taken: Collection[str]) -> None:
    """Raises ConfigError if the first line has a field that cannot be kept. The later lines are checked on reading."""
    with source.open() as stream:
        first = next(jsonl.objects(source.name, stream, options.max_line_bytes), None)
    if first is not None and not isinstance(first, Problem):
        tables.check_kept(options, taken, [name for name in first if name not in OWN_IDS])


class ReadAhead(Generic[T]):
    """An iterator that reads ahead from a slow iterator, such as a terminal or a pipe. Yields None while no item is
    ready.

    A daemon thread waits for the input. This thread is never joined, because it may be blocked for ever.
    """

    def __init__(self, slow: Iterator[T]) -> None:
        self._ready: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue(_ROWS_AHEAD)
        self._thread = threading.Thread(target=self._read, args=(slow,), name="llamabatch-input", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T | None]:
        return self

    def __next__(self) -> T | None:
        try:
            item, error = self._ready.get_nowait()
        except queue.Empty:
            return None
        if error is not None:
            self._ready.put((None, error))  # the next call raises the same error
            raise error
        return item

    def _read(self, slow: Iterator[T]) -> None:
        try:
            for item in slow:
                self._ready.put((item, None))
        except Exception as error:
            self._ready.put((None, error))
        else:
            self._ready.put((None, StopIteration()))
