"""Runs chat templates within bounds: in jinja2's sandbox, with a budget that pays for every step and every byte.

A template is a program from a model's file. jinja2's sandbox limits access, but neither time nor memory: three nested
loops run forever, and `'a' * 10**10` is one native call that nothing can interrupt. So the compiled template pays
before it acts: for entering a block (every loop and every macro enters blocks), for the operands of operators, for the
input of filters, tests and methods, and for the output that they can make of the input. An operation without a price
is refused. The same input costs the same on every machine, so that a template fits on all machines or on none.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import threading
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from datetime import datetime
from types import MethodType
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import EscapeFormatter, Markup

from llamabatch.errors import ConfigError
from llamabatch.utils.checks import show

MAX_SOURCE = 256 * 2**10  # characters; longer templates take seconds to compile, and the longest known one has 40 KB
# One unit is the time of writing a byte: some nanoseconds.
BUDGET = 128 * 2**20
PER_BYTE = 2048  # added for each byte of the conversation: templates may walk all of it for each message
MAX_BUDGET = 2**31
MAX_DEPTH = 100  # levels of lists in lists
MAX_BITS = 2**14  # of a whole number
MAX_VALUE = 2**27  # units of one value that is worked on as a whole
_STEP, _NODE, _CALL, _ITEM, _HELD = 128, 48, 256, 64, 64
_LETTER = 84  # for each letter of a text that becomes a list: most letters are objects of their own
_LOOK_EVERY = 2**20  # units between two calls of `cancelled`

_CHANGES = ("append", "pop")  # allowed on lists that the template itself has made; Kimi-K2's template uses them

# No chat template needs these filters, and their cost is unknown before they run.
_NO_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")


class TemplateLimit(Exception):
    """The error of a template that needs more than it may use."""


class Meter:
    """The budget of one rendering, and the rest that is left.

    Args:
        budget: units.
        cancelled: called now and then; True ends the rendering.
        given: ids of the lists that are passed to the template, which it may not change.
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
        written: For the rows of a table: returns the text of a value, or None for a value without a text, which is an
            error. To write a missing variable is an error, too. Without `written`, as for chats, a missing variable
            is written as "", and any value as Python writes it.

    Attributes:
        variables: names that the template reads.

    Raises:
        ConfigError: it cannot be compiled.
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
        except Exception as error:  # jinja2 and Python's compiler: RecursionError, MemoryError, ValueError and more
            advice = _OF_GO if _GO.search(source) else ""
            raise ConfigError(f"{name} cannot be compiled: {describe(error)}{advice}") from error

    def render(self, variables: Mapping[str, Any], cancelled: Callable[[], bool] | None = None) -> str:
        """Returns the text. Raises TemplateLimit, CancelledError, and any exception of the template."""
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
    text = str(error) or type(error).__name__
    return text if len(text) <= 500 else f"{text[:500]}…"


def weight(value: Any, most: int) -> int:
    """Returns the approximate bytes of a value with all items in it; each item counts as often as it occurs.

    Raises:
        TemplateLimit: the value weighs more than `most`, or its lists nest deeper than MAX_DEPTH.
    """
    total, level, depth = 0, [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise TemplateLimit(f"lists are nested more than {MAX_DEPTH} deep")
        below: list[Any] = []
        for item in level:
            total += _HELD
            if isinstance(item, str):
                total += len(item) if item.isascii() else 4 * len(item)
            elif item is None or isinstance(item, (bool, float)):
                continue
            elif isinstance(item, int):
                total += item.bit_length() >> 3
            elif isinstance(item, (list, tuple, set, frozenset, abc.KeysView, abc.ValuesView, abc.ItemsView)):
                if total + _HELD * len(item) <= most:
                    below.extend(item)
                else:
                    total = most + 1
            elif isinstance(item, Mapping):
                if total + 2 * _HELD * len(item) > most:
                    total = most + 1
                else:
                    below.extend(item.keys())
                    below.extend(item.values())
            elif isinstance(item, (bytes, bytearray)):
                total += len(item)
            elif isinstance(item, range):
                total += 32 * len(item)
            elif isinstance(item, Namespace):
                below.append(object.__getattribute__(item, "_Namespace__attrs"))
            if total > most:
                raise TemplateLimit("a value is too large")
        level = below
    return total


def _lists(value: Any) -> Iterator[int]:
    """Yields the ids of all lists in a value. `weight` must have bounded the value before."""
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
    """The iterator of a filter such as `map`, paid for item by item. Python frees a long chain of these without
    recursion; a chain of generators would need the stack."""

    __slots__ = ("_items", "_spend")

    def __init__(self, items: Iterator[Any], spend: Callable[[int], None]) -> None:
        self._items, self._spend = items, spend

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._spend(_ITEM)
        return next(self._items)


class _Generation(Extension):
    """The tag `{% generation %}` of transformers, which marks the assistant's text for training. Here its content is
    written unchanged, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Missing(jinja2.Undefined):
    """A variable that a row does not have. A template may test the variable, but not write it."""

    def __str__(self) -> str:
        raise jinja2.UndefinedError(f"{show(self._undefined_name)} has no value")


class _Environment(ImmutableSandboxedEnvironment):
    """The jinja2 environment that Hugging Face's templates are written for (transformers, chat_template_utils.py),
    tojson included. It adds the prices."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, written: Written | None = None) -> None:
        self._of_thread = threading.local()

        @pass_context  # keeps jinja2 from computing constants while it compiles
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

        jinja2 would put lines of the template into the traceback, in a cycle that keeps the template's values alive.
        """
        if isinstance(sys.exc_info()[1], jinja2.TemplateSyntaxError):  # jinja2 takes the line number out of its text
            super().handle_exception(source)
        raise  # a variable for the exception would make a cycle, too

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Applies the sandbox's rule, and also allows append and pop on lists that the template itself has made."""
        if attr in _CHANGES and type(obj) is list:
            return id(obj) not in self._of_thread.meter.given
        return super().is_safe_attribute(obj, attr, value)

    def metered(self, meter: Meter) -> _Metered:
        """Returns a context manager for a `with` block in which this thread pays from `meter`."""
        return _Metered(self._of_thread, meter)

    @property
    def left(self) -> int:
        return max(0, int(self._of_thread.meter.left))

    def spend(self, units: int) -> None:
        """Takes units from the meter of this thread. Raises as Meter.look."""
        meter = self._of_thread.meter
        meter.left -= units
        if meter.left < meter.next_look:
            meter.look()

    def tick(self, units: int) -> bool:
        """Pays for the condition of a loop; always True."""
        self.spend(units)
        return True

    def light(self, value: Any, factor: int = 4) -> Any:
        """Pays for an operation that copies, compares or writes all of a value; returns the value."""
        kind = type(value)
        if kind is str:
            self.spend(len(value) if value.isascii() else 4 * len(value))
        elif kind is not bool and value is not None:
            self.spend(factor * weight(value, min(self.left // factor, MAX_VALUE)))
        return value

    def holder(self, value: Any) -> Any:
        """Pays for the right side of `in`; returns the value. A mapping costs nothing, as it finds its key at once."""
        if isinstance(value, Mapping):
            return value
        return self.light(list(value) if isinstance(value, _Items) else value)

    def cut(self, value: Any, where: slice) -> Any:
        """Returns value[where], and pays for it."""
        piece = value[where]  # the piece is no larger than the value, which is paid for already
        self.spend(_CALL + _shallow(piece))
        return piece

    def spread(self, value: Any) -> Any:
        """Pays for `*value` or `**value` of a call, which copies the value; returns the value."""
        if isinstance(value, _Items):
            return list(value)
        self.spend(_LETTER * len(value) if isinstance(value, str) else 2 * _shallow(value))
        return value

    def concat(self, pieces: Any) -> str:  # type: ignore[override]  # a function there
        text = "".join(pieces)  # each piece is paid for
        self.spend(len(text))
        return text

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.spend(_CALL)  # filters walk long paths of attributes with getitem, and a miss takes microseconds
        if type(argument) is tuple:  # to hash a tuple, Python reads all of its items
            self.light(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, str) and operator == "%":
            self.pay_for_percent(left, right)
        elif isinstance(left, (int, float)) and isinstance(right, (int, float)):
            self._check_numbers(operator, left, right)
        elif operator == "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int):
                self.spend(_shallow(sequence) * max(0, times))
        else:
            is_escaped = isinstance(left, Markup) or isinstance(right, Markup)
            self.spend((_shallow(left) + _shallow(right)) * (6 if is_escaped else 1))
        result = super().call_binop(context, operator, left, right)
        self.check_result(result)
        return result

    def _check_numbers(self, operator: str, left: float, right: float) -> None:
        self.check_result(left)
        self.check_result(right)
        is_power = operator == "**" and isinstance(left, int) and isinstance(right, int)
        if is_power and int(left).bit_length() * abs(right) > MAX_BITS:
            raise TemplateLimit(f"a whole number has more than {MAX_BITS:,} bits")

    def check_result(self, value: Any) -> None:
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise TemplateLimit(f"a whole number has more than {MAX_BITS:,} bits")

    def pay_for_percent(self, form: str, values: Any) -> None:
        """Pays for `form % values`: any number in the form may be a width."""
        if "*" in form:
            raise TemplateLimit("a format has '*' for its width; write the width")
        n_uses = form.count("%") if isinstance(values, Mapping) else 1
        self.spend(_numbers(form) + _shallow(form) + 4 * max(1, n_uses) * weight(values, MAX_VALUE))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text: str = value.__self__  # type: ignore[attr-defined]  # it is a method
        formatter = _MarkupFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)
        by_mapping = value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            if by_mapping:
                [kwargs], args = args, ()  # type: ignore[assignment]  # ValueError as of any wrong call
            self.spend(_CALL + _shallow(text))
            made: str = type(text)(formatter.vformat(text, args, kwargs))
            return made

        return formatted

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.spend(_CALL + 8 * (len(args) + len(kwargs)))
        if not isinstance(obj, (Macro, BlockReference, LoopContext)):  # these three pay while they run
            # native code would walk an iterator without paying
            args = tuple(list(value) if isinstance(value, _Items) else value for value in args)
            for value in (*args, *kwargs.values()):
                self.light(value)
            owner = getattr(obj, "__self__", None)
            if isinstance(owner, Markup):  # Markup escapes its arguments
                self.light([*args, *kwargs.values()], 6)
            if owner is not None and (isinstance(owner, Markup) or not isinstance(obj, MethodType)):
                self._pay_for_method(owner, obj.__name__, (*args, *kwargs.values()))
        result = super().call(context, obj, *args, **kwargs)
        self.spend(_shallow(result))
        return result

    def _pay_for_method(self, owner: Any, name: str, values: tuple[Any, ...]) -> None:
        """Pays for a method of a built-in type; a method without a price is refused."""
        for kinds, prices in _METHODS:
            if isinstance(owner, kinds) and name in prices:
                self.spend(prices[name](owner, values))
                return
        if isinstance(owner, _BUILT_IN) or (isinstance(owner, type) and issubclass(owner, _BUILT_IN)):
            kind = owner if isinstance(owner, type) else type(owner)
            raise jinja2.exceptions.SecurityError(f"{name!r} of {kind.__name__!r} cannot be called in a chat template")

    def _now(self, form: str) -> str:
        self.spend(256 * len(form))  # one character of the form may become this much text
        return datetime.now().strftime(form)


class _Metered:
    """A `with` block that sets the meter of a thread. A rendering inside another one pays from its own meter."""

    def __init__(self, of_thread: threading.local, meter: Meter) -> None:
        self._of_thread, self._meter = of_thread, meter

    def __enter__(self) -> None:
        self._before = getattr(self._of_thread, "meter", None)
        self._of_thread.meter = self._meter

    def __exit__(self, *exc: object) -> None:
        self._of_thread.meter = self._before


class _Formatter(SandboxedFormatter):
    """A str.format in which each field pays for its width and its value."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        environment: Any = self._env
        environment.light(value)
        environment.spend(_CALL + _numbers(str(format_spec)))
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        environment: Any = self._env
        environment.light(value)
        return super().convert_field(value, conversion)


class _MarkupFormatter(_Formatter, EscapeFormatter):
    pass


class _Generator(CodeGenerator):
    """A code generator that adds the payments to the compiled code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wrapped: dict[int, str] = {}  # id of an expression -> the text that opens the call around it

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        opening = self._wrapped.pop(id(node), None)
        if opening is not None:
            self.write(opening)
        result = super().visit(node, *args, **kwargs)
        if opening is not None:
            self.write(")")
        return result

    def blockvisit(self, body: abc.Iterable[nodes.Node], frame: Frame) -> None:
        body = list(body)
        self.writeline(f"environment.spend({_price(body)})")
        super().blockvisit(body, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:  # the test also runs for items that never reach the body
            self._wrapped[id(node.test)] = f"(environment.tick({_price([node.test])}) and "
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        for operand in node.nodes:
            self._lighten(operand)
        super().visit_Concat(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self._lighten(node.expr)
        for operand in node.ops:
            self._lighten(operand.expr, "holder" if operand.op in ("in", "notin") else "light")
        super().visit_Compare(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        for pair in node.items:
            self._lighten(pair.key)
        super().visit_Dict(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.cut(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for part in (node.arg.start, node.arg.stop, node.arg.step):
            if part is None:
                self.write("None")
            else:
                self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def signature(self, node: Any, frame: Frame, extra_kwargs: Any = None) -> None:
        for spread in (node.dyn_args, node.dyn_kwargs):
            if spread is not None:
                self._wrapped[id(spread)] = "environment.spread("
        super().signature(node, frame, extra_kwargs)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:
        self.fail("autoescape is for HTML, and not for chat templates", node.lineno)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier, frame: Frame) -> None:
        self.fail("autoescape is for HTML, and not for chat templates", node.lineno)

    def _lighten(self, node: nodes.Node, by: str = "light") -> None:
        is_constant = isinstance(node, nodes.Const) or (
            isinstance(node, (nodes.List, nodes.Tuple)) and all(isinstance(item, nodes.Const) for item in node.items)
        )
        if not is_constant:  # the price of a block covers the length of its constants
            self._wrapped[id(node)] = f"environment.{by}("


_Environment.code_generator_class = _Generator


def _price(body: list[nodes.Node]) -> int:
    """Returns the units for running these nodes once. The blocks inside them pay for themselves."""
    price, left = _STEP, list(body)
    while left:
        node = left.pop()
        price += _NODE
        if isinstance(node, nodes.TemplateData):
            price += len(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            price += len(node.value)
        for name, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                left.append(value)
            elif isinstance(value, list) and name not in ("body", "else_"):
                left.extend(item for item in value if isinstance(item, nodes.Node))
    return price


def _shallow(value: Any) -> int:
    """Returns the approximate bytes of a copy of the value, without its items."""
    if isinstance(value, str):
        size = len(value) if value.isascii() else 4 * len(value)
        return 6 * size if isinstance(value, Markup) else size  # text that is added to Markup is escaped
    if isinstance(value, (list, tuple)):
        return 8 * len(value)
    if isinstance(value, (dict, bytes, abc.MappingView)):
        return 32 * len(value)
    return 8


def _numbers(form: str) -> int:
    """Returns the sum of all numbers in a format, as an upper bound of its widths."""
    found = re.findall(r"\d+", form)
    if any(len(number) > 9 for number in found):
        raise TemplateLimit(f"a format has a width of {max(map(len, found))} digits")
    return sum(map(int, found))


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


# Prices of methods cover the input and the output of a method. `call` pays for the arguments.


def _integers(values: abc.Iterable[Any]) -> int:
    return sum(abs(value) for value in values if isinstance(value, int))


def _search(text: Any, values: tuple[Any, ...]) -> int:
    needle = len(values[0]) if values and isinstance(values[0], (str, bytes)) else 1
    return _shallow(text) * (1 + min(needle, 128) // 8)


def _split(text: Any, values: tuple[Any, ...]) -> int:
    separator = values[0] if values else None
    n_parts = text.count(separator) + 1 if separator and isinstance(separator, str) else len(text)
    return _search(text, values) + 64 * int(n_parts)


def _replace(text: Any, values: tuple[Any, ...]) -> int:
    if len(values) < 2 or not isinstance(values[0], str) or not isinstance(values[1], str):
        return 0  # Python refuses the call
    n_found = text.count(values[0])  # an empty text is found between all characters
    return _search(text, values) + int(n_found) * max(_shallow(values[1]), 8) * (4 if not text.isascii() else 1)


def _join(text: Any, values: tuple[Any, ...]) -> int:
    items = values[0] if values else None
    letters = _LETTER * len(items) if isinstance(items, str) else 0
    return letters + (len(items) if isinstance(items, abc.Sized) else 0) * _shallow(text)


def _few(value: Any, values: tuple[Any, ...]) -> int:
    return 0


def _copied(value: Any, values: tuple[Any, ...]) -> int:
    return 4 * _shallow(value)


def _padded(text: Any, values: tuple[Any, ...]) -> int:
    return _shallow(text) + 4 * _integers(values)


def _compared(value: Any, values: tuple[Any, ...]) -> int:
    return weight(value, MAX_VALUE)


def _tabs(text: Any, values: tuple[Any, ...]) -> int:
    return _shallow(text) + int(text.count("\t")) * (_integers(values) or 8) * 4


_BUILT_IN = (str, bytes, list, tuple, dict, int, float, range, set, frozenset, abc.MappingView)
_Price = Callable[[Any, tuple[Any, ...]], int]
_METHODS: tuple[tuple[Any, dict[str, _Price]], ...] = (
    (
        str,
        {
            **dict.fromkeys(("startswith", "endswith"), _few),
            **dict.fromkeys(("capitalize", "casefold", "lower", "upper", "title", "swapcase", "encode"), _copied),
            **dict.fromkeys(("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"), _copied),
            **dict.fromkeys(("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier"), _copied),
            **dict.fromkeys(("islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper"), _copied),
            **dict.fromkeys(("find", "rfind", "index", "rindex", "count", "partition", "rpartition"), _search),
            **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
            **dict.fromkeys(("split", "rsplit", "splitlines"), _split),
            "expandtabs": _tabs,
            "join": _join,
            "replace": _replace,
        },
    ),
    (bytes, dict.fromkeys(("decode", "hex"), _copied)),
    ((list, tuple, range), dict.fromkeys(("index", "count"), _compared)),
    ((list, dict, set, frozenset), {"copy": _copied}),
    (list, {"append": _few, "pop": _copied}),
    (dict, dict.fromkeys(("get", "keys", "values", "items"), _few)),
    (int, dict.fromkeys(("bit_length", "bit_count", "as_integer_ratio", "conjugate", "is_integer"), _few)),
    (float, dict.fromkeys(("is_integer", "as_integer_ratio", "hex", "conjugate"), _few)),
)


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
                environment.spend(_LETTER * len(values[0]) if isinstance(values[0], str) else 2 * _shallow(values[0]))
            elif name not in _LAZY and name not in _AT_ONCE:
                environment.light(values[0], factor)
                if isinstance(values[0], str) and name in _LETTER_BY_LETTER:
                    environment.spend(_LETTER * len(values[0]))
            environment.spend(_growth(environment, name, values, kwargs))
        result = function(*before, *values, **kwargs)
        if isinstance(result, Iterator):
            return _Items(result, environment.spend)
        environment.spend(_shallow(result) if name not in _AT_ONCE else 0)
        environment.check_result(result)
        return result

    return functools.update_wrapper(priced, function, updated=("__dict__",) if n_before else ())


def _growth(environment: _Environment, name: str, values: list[Any], kwargs: dict[str, Any]) -> int:
    """Returns the units for the output of a filter beyond its input, which depends on the filter's parameters."""
    value, parameters = values[0], (*values[1:], *kwargs.values())
    text = value if isinstance(value, str) else ""
    numbers = 4 * _integers(parameters)
    longest = max((_shallow(each) for each in parameters if isinstance(each, str)), default=0)
    if name in ("center", "batch", "slice", "truncate"):
        return 16 * numbers
    if name == "round":
        if _integers(parameters) > 1000:
            raise TemplateLimit(f"a number is rounded to {_integers(parameters)} digits; allowed are up to 1000")
    elif name == "indent":
        lines = len(text.splitlines()) if text else weight(value, MAX_VALUE)
        environment.spend(64 * lines)
        return (lines + 1) * (numbers + longest + 16)
    elif name == "replace":
        form = str(value)  # paid for
        return _replace(form, tuple(map(str, values[1:3])) if len(values) > 2 else tuple(map(str, parameters[:2])))
    elif name == "join":
        return (len(value) if isinstance(value, abc.Sized) else 0) * longest
    elif name == "tojson":
        separators = sum(map(len, map(str, kwargs.get("separators") or ())))
        indent = _integers((kwargs.get("indent"),)) + (longest if isinstance(kwargs.get("indent"), str) else 0)
        if indent or separators:
            return weight(value, MAX_VALUE) // _HELD * (indent * MAX_DEPTH + separators)
    elif name == "format":
        environment.pay_for_percent(str(value), kwargs or tuple(values[1:]))
    elif name == "sum":
        start = [each for each in parameters if isinstance(each, (list, tuple))]
        if start:  # each item is added to a copy of all before it
            return weight(value, MAX_VALUE) * (len(value) if isinstance(value, abc.Sized) else 1)
    return 0


def _priced_test(environment: _Environment, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    n_before = 1 if hasattr(function, "jinja_pass_arg") else 0

    def priced(*args: Any, **kwargs: Any) -> Any:
        values = (*args[n_before:], *kwargs.values())
        environment.spend(_CALL)
        if name in ("odd", "even", "divisibleby") and values and isinstance(values[0], str):
            environment.pay_for_percent(values[0], values[1:])  # Python's % formats a text
        for position, value in enumerate(values):
            if position == 1 and name == "in":  # a mapping finds its key at once
                environment.holder(value)
            else:
                environment.light(value)
        return function(*args, **kwargs)

    return functools.update_wrapper(priced, function, updated=("__dict__",) if n_before else ())
