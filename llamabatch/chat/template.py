"""Runs chat templates within limits: in jinja2's sandbox, with a budget. Every step and every byte costs a part of it.

A template is a program from a model's file. jinja2's sandbox limits access, but neither time nor memory: three nested
loops run forever, and `'a' * 10**10` is one native call that nothing can interrupt. So the compiled template pays from
the budget before each action. It pays for entering a block (every loop and every macro enters blocks), for the operands
of operators, for the input of filters, tests and methods, and for the output that these can make of the input. An
operation without a price is refused. The same input costs the same on every machine, so a template fits its budget on
all machines or on none.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from datetime import datetime
from types import MethodType
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from markupsafe import EscapeFormatter, Markup

from llamabatch.chat.template_code import Generator
from llamabatch.chat.template_prices import (
    LETTER,
    MAX_VALUE,
    TemplateLimit,
    growth,
    price_of_method,
    price_of_percent,
    shallow,
    weight,
    widths,
)
from llamabatch.errors import ConfigError
from llamabatch.utils.checks import show

# Maximum number of characters in a template, because a longer template takes seconds to compile. The longest known
# template has 40 KB.
MAX_SOURCE = 256 * 2**10
# Units of work for one rendering. A unit is the time that it takes to write a byte: some nanoseconds.
BUDGET = 128 * 2**20
# Units added to BUDGET for each byte of a conversation, because a template may read the whole conversation for each
# message.
PER_BYTE = 2048
MAX_BUDGET = 2**31
MAX_BITS = 2**14  # maximum number of bits of a whole number
_CALL, _ITEM = 256, 64
_LOOK_EVERY = 2**20  # units between two calls of `cancelled`

_CHANGES = ("append", "pop")  # a template may call these on lists that it has made, as Kimi-K2's template does

# Filters that templates cannot use. No chat template needs these filters, and their cost is not known before they run.
_NO_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")


class Meter:
    """The budget of one rendering in units of work, and the units that are left.

    Args:
        budget: the number of units.
        cancelled: called now and then; True ends the rendering.
        given: id() of each list that is passed to the template. The template may not change these lists.
    """

    def __init__(
        self, budget: int, cancelled: Callable[[], bool] | None = None, given: frozenset[int] = frozenset()
    ) -> None:
        self.budget = self.left = budget
        self.given = given
        self._cancelled = cancelled
        self.next_look = budget - _LOOK_EVERY

    def look(self) -> None:
        """Raises TemplateLimit if the budget is spent, and CancelledError if the text is not needed any more."""
        if self.left < 0:
            raise TemplateLimit(
                f"it takes more than the {self.budget:,} steps and bytes that a conversation of this size allows"
            )
        if self._cancelled is not None and self._cancelled():
            raise CancelledError
        self.next_look = max(0, self.left - _LOOK_EVERY)


Written = Callable[[Any], "str | None"]

_GO = re.compile(r"\{\{-?\s*(?:(?:if|range|with|else if)\s+[^}]*)?[.$]\w*")
_OF_GO = "; it looks like an ollama template in Go's language: give the model's own jinja2 template"


class BoundedTemplate:
    """A compiled template, for conversations or for the rows of a table.

    Args:
        source: jinja2, as Hugging Face's transformers read it.
        written: A function for the rows of a table. The function returns the text of a value, or None for a value
            without a text. Rendering fails if the template writes such a value or a missing variable. Without
            `written`, as for chats, a missing variable is written as "", and any value as Python writes it.

    Attributes:
        variables: names that the template reads.

    Raises:
        ConfigError: the source cannot be compiled.
    """

    def __init__(self, source: str, *, written: Written | None = None) -> None:
        name = "the chat template" if written is None else "the template"
        if len(source) > MAX_SOURCE:
            raise ConfigError(f"{name} has {len(source):,} characters; allowed are up to {MAX_SOURCE:,}")
        self._environment = _Environment(written)
        self._changes_lists = any(name in source for name in _CHANGES)
        try:
            with self._environment.metered(Meter(BUDGET)):
                free = jinja2.meta.find_undeclared_variables(self._environment.parse(source))
                self.variables = frozenset(free if written is None else free - self._environment.globals.keys())
                self._template = self._environment.from_string(source)
        except Exception as error:  # jinja2 and Python's compiler raise RecursionError, MemoryError and more
            advice = _OF_GO if _GO.search(source) else ""
            raise ConfigError(f"{name} cannot be compiled: {describe(error)}{advice}") from error

    def render(self, variables: Mapping[str, Any], cancelled: Callable[[], bool] | None = None) -> str:
        """Returns the rendered text. Raises TemplateLimit, CancelledError, and any exception of the template."""
        size = weight(variables, MAX_BUDGET)
        given = frozenset(_lists(variables)) if self._changes_lists else frozenset()
        meter = Meter(min(BUDGET + PER_BYTE * size, MAX_BUDGET), cancelled, given)
        with self._environment.metered(meter):
            return self._template.render(variables)


def describe(error: BaseException) -> str:
    """Returns the error of a template in a few words, never an empty text."""
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    if isinstance(error, MemoryError):
        return "it runs out of memory"
    if isinstance(error, jinja2.TemplateSyntaxError):
        text = f"line {error.lineno}: {error.message}"
    else:
        text = str(error) or type(error).__name__
    return text if len(text) <= 500 else f"{text[:500]}…"


def _lists(value: Any) -> Iterator[int]:
    """Yields id() of each list in a value. The caller must check the size of the value with `weight` first."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, list):
            yield id(item)
        if isinstance(item, (list, tuple)):
            left += item
        elif isinstance(item, Mapping):
            left += item.values()


class _Items:
    """An iterator that pays for each item of a filter such as `map`. This is a class and not a generator, because
    Python frees a long chain of generators recursively, which needs stack."""

    __slots__ = ("_items", "_spend")

    def __init__(self, items: Iterator[Any], spend: Callable[[int], None]) -> None:
        self._items, self._spend = items, spend

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._spend(_ITEM)
        return next(self._items)


class _Generation(Extension):
    """The tag `{% generation %}` of transformers, which marks the assistant's text for training. Here, the content of
    the tag is written unchanged, in its own scope."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Missing(jinja2.Undefined):
    """A variable that a row does not have. A template may test the variable, but not write it."""

    def __str__(self) -> str:
        raise jinja2.UndefinedError(f"{show(self._undefined_name)} has no value")


class _Environment(ImmutableSandboxedEnvironment):
    """The jinja2 environment for which chat templates are written, with the filter tojson of Hugging Face's
    transformers (chat_template_utils.py). This class adds the prices."""

    code_generator_class = Generator
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, written: Written | None = None) -> None:
        self._of_thread = threading.local()

        @pass_context  # stops jinja2 from computing constants while it compiles
        def finalize(context: Context, value: Any) -> Any:
            if written is not None and not isinstance(value, jinja2.Undefined):
                text = written(value)
                if text is None:
                    raise jinja2.TemplateError(f"it writes {show(value)}, which is no text")
                value = text
            return self.light(value)

        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            optimized=False,
            finalize=finalize,
            undefined=jinja2.Undefined if written is None else _Missing,
        )
        self.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        self.filters = {
            name: _priced_filter(self, name, f) for name, f in self.filters.items() if name not in _NO_FILTERS
        }
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {n: f if n in _CHEAP_TESTS else _priced_test(self, n, f) for n, f in tests.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = self._now

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raises the exception of a template as it is.

        jinja2 would put lines of the template into the traceback. The traceback would then form a cycle, and keep the
        template's values alive.
        """
        raise  # a variable for the exception would also make a cycle

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Applies the sandbox's rule, and also allows append and pop on lists that the template itself has made."""
        if attr in _CHANGES and type(obj) is list:
            return id(obj) not in self._of_thread.meter.given
        return super().is_safe_attribute(obj, attr, value)

    def metered(self, meter: Meter) -> _Metered:
        """Returns a context manager. Inside its `with` block, this thread pays from `meter`."""
        return _Metered(self._of_thread, meter)

    @property
    def left(self) -> int:
        return max(0, int(self._of_thread.meter.left))

    def spend(self, units: int) -> None:
        """Takes units from the meter of this thread. Errors are as in Meter.look."""
        meter = self._of_thread.meter
        meter.left -= units
        if meter.left < meter.next_look:
            meter.look()

    def tick(self, units: int) -> bool:
        """Pays for the condition of a loop. Returns True."""
        self.spend(units)
        return True

    def light(self, value: Any, factor: int = 4) -> Any:
        """Pays for an operation that copies, compares or writes all of a value. Returns the value."""
        kind = type(value)
        if kind is str:
            self.spend(len(value) if value.isascii() else 4 * len(value))
        elif kind is not bool and value is not None:
            self.spend(factor * weight(value, min(self.left // factor, MAX_VALUE)))
        return value

    def holder(self, value: Any) -> Any:
        """Pays for the right side of `in`. Returns the value. A mapping costs nothing, because a key is found
        quickly."""
        if isinstance(value, Mapping):
            return value
        return self.light(list(value) if isinstance(value, _Items) else value)

    def cut(self, value: Any, where: slice) -> Any:
        """Returns value[where], and pays for this piece."""
        piece = value[where]  # the piece is no larger than the value, which is paid for already
        self.spend(_CALL + shallow(piece))
        return piece

    def spread(self, value: Any) -> Any:
        """Pays for the copy that `*value` or `**value` makes. Returns the value."""
        if isinstance(value, _Items):
            return list(value)
        self.spend(LETTER * len(value) if isinstance(value, str) else 2 * shallow(value))
        return value

    def concat(self, pieces: Any) -> str:  # type: ignore[override]  # the base class has a function
        text = "".join(pieces)  # the pieces are paid for already
        self.spend(len(text))
        return text

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.spend(_CALL)  # filters look up long attribute paths with getitem, and a failure takes microseconds
        if type(argument) is tuple:  # to hash a tuple, Python reads all of its items
            self.light(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, str) and operator == "%":
            self.spend(price_of_percent(left, right))
        elif isinstance(left, (int, float)) and isinstance(right, (int, float)):
            _check_size(left)
            _check_size(right)
            if operator == "**" and isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * abs(right))
        elif operator == "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int):
                self.spend(shallow(sequence) * max(0, times))
        else:
            is_escaped = isinstance(left, Markup) or isinstance(right, Markup)
            self.spend((shallow(left) + shallow(right)) * (6 if is_escaped else 1))
        result = super().call_binop(context, operator, left, right)
        _check_size(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text: str = value.__self__  # type: ignore[attr-defined]  # `value` is a bound method
        formatter = _MarkupFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)
        by_mapping = value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            if by_mapping:
                [kwargs], args = args, ()  # type: ignore[assignment]  # a wrong number of arguments raises ValueError
            self.spend(_CALL + shallow(text))
            made: str = type(text)(formatter.vformat(text, args, kwargs))
            return made

        return formatted

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.spend(_CALL + 8 * (len(args) + len(kwargs)))
        if not isinstance(obj, (Macro, BlockReference, LoopContext)):  # macros, blocks and loops pay while they run
            # native code would read an iterator without paying
            args = tuple(list(value) if isinstance(value, _Items) else value for value in args)
            for value in (*args, *kwargs.values()):
                self.light(value)
            owner = getattr(obj, "__self__", None)
            if isinstance(owner, Markup):  # Markup escapes its arguments
                self.light([*args, *kwargs.values()], 6)
            if owner is not None and (isinstance(owner, Markup) or not isinstance(obj, MethodType)):
                self.spend(price_of_method(owner, obj.__name__, (*args, *kwargs.values())))
        result = super().call(context, obj, *args, **kwargs)
        self.spend(shallow(result))
        return result

    def _now(self, form: str) -> str:
        self.spend(256 * len(form))  # one character of the format may become 256 bytes of text
        return datetime.now().strftime(form)


class _Metered:
    """A context manager that sets the meter of a thread. A rendering inside another rendering pays from its own
    meter."""

    def __init__(self, of_thread: threading.local, meter: Meter) -> None:
        self._of_thread, self._meter = of_thread, meter

    def __enter__(self) -> None:
        self._before = getattr(self._of_thread, "meter", None)
        self._of_thread.meter = self._meter

    def __exit__(self, *exc: object) -> None:
        self._of_thread.meter = self._before


class _Formatter(SandboxedFormatter):
    """A str.format that takes the price of each field's width and value from the budget."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        environment: Any = self._env
        environment.light(value)
        environment.spend(_CALL + widths(str(format_spec)))
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        environment: Any = self._env
        environment.light(value)
        return super().convert_field(value, conversion)


class _MarkupFormatter(_Formatter, EscapeFormatter):
    pass


def _check_size(value: Any) -> None:
    if isinstance(value, int):
        _check_bits(value.bit_length())


def _check_bits(n_bits: int) -> None:
    if n_bits > MAX_BITS:
        raise TemplateLimit(f"a whole number has more than {MAX_BITS:,} bits")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


# Prices of filters and tests.

_LAZY = ("map", "select", "reject", "selectattr", "rejectattr")
_AT_ONCE = ("attr", "count", "d", "default", "first", "items", "last", "length", "random")
_FACTORS = {
    **dict.fromkeys(("sort", "dictsort", "groupby", "unique", "min", "max"), 24),
    **dict.fromkeys(("e", "escape", "forceescape", "urlencode", "tojson"), 12),
    **dict.fromkeys(("capitalize", "upper", "lower", "truncate"), 8),
}
_LETTER_BY_LETTER = (
    *("batch", "groupby", "join", "max", "min", "slice", "sort", "sum", "title", "unique", "wordcount"),
)
_CHEAP_TESTS = (
    *("boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable", "mapping", "none"),
    *("number", "sameas", "sequence", "string", "true", "undefined"),
)


def _priced_filter(environment: _Environment, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    n_before = 1 if hasattr(function, "jinja_pass_arg") else 0
    factor = _FACTORS.get(name, 4)

    def priced(*args: Any, **kwargs: Any) -> Any:
        before, values = args[:n_before], list(args[n_before:])
        environment.spend(_CALL)
        for parameter in (*values[1:], *kwargs.values()):
            environment.light(parameter)
        if values:
            if isinstance(values[0], _Items) and name not in (*_LAZY, *_AT_ONCE, "string"):
                values[0] = list(values[0])
            if name == "list":
                environment.spend(LETTER * len(values[0]) if isinstance(values[0], str) else 2 * shallow(values[0]))
            elif name not in _LAZY and name not in _AT_ONCE:
                environment.light(values[0], factor)
                if isinstance(values[0], str) and name in _LETTER_BY_LETTER:
                    environment.spend(LETTER * len(values[0]))
            environment.spend(growth(name, values, kwargs))
        result = function(*before, *values, **kwargs)
        if isinstance(result, Iterator):
            return _Items(result, environment.spend)
        environment.spend(shallow(result) if name not in _AT_ONCE else 0)
        _check_size(result)
        return result

    return functools.update_wrapper(priced, function, updated=("__dict__",) if n_before else ())


def _priced_test(environment: _Environment, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    n_before = 1 if hasattr(function, "jinja_pass_arg") else 0

    def priced(*args: Any, **kwargs: Any) -> Any:
        values = (*args[n_before:], *kwargs.values())
        environment.spend(_CALL)
        if name in ("odd", "even", "divisibleby") and values and isinstance(values[0], str):
            environment.spend(price_of_percent(values[0], values[1:]))  # for a text, % means formatting
        for position, value in enumerate(values):
            if position == 1 and name == "in":  # holder() charges nothing for a mapping
                environment.holder(value)
            else:
                environment.light(value)
        return function(*args, **kwargs)

    return functools.update_wrapper(priced, function, updated=("__dict__",) if n_before else ())
