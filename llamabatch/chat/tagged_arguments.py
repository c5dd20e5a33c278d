"""Makes the grammar rules for arguments between tags: the names, the order and the number of the arguments."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamabatch.chat.tagged_values import Values
from llamabatch.chat.text_patterns import found_in_text
from llamabatch.chat.tool_schemas import Budget, TypesOf, checked_parts, count, lists_of_values, refused, unknown_type
from llamabatch.errors import SamplingError
from llamabatch.request.json_schema import referred
from llamabatch.request.lark_rules import MAX_CHARS, PARAMETERS, Raw, Rules, quoted
from llamabatch.utils.checks import show

NAME = Raw(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,63}", "x")  # matches names of arguments that are not in the schema
_MOST_FORMS = 64  # maximum number of forms of one schema
_MOST_COUNTS = 4096  # maximum number of rules that count the arguments of one form
_DEEPEST = 64  # maximum depth of schemas within schemas


@dataclass(frozen=True)
class Tags:
    """The texts around an argument: `key` before the name, `value` before the value, and `end` after the value."""

    key: str
    value: str
    end: str


@dataclass(frozen=True)
class Form:
    """One way in which arguments fit a schema.

    Attributes:
        named: schemas of arguments by name, in the order in which the arguments come.
        is_listed: True: a name outside of `named` is allowed only if `patterns` or `other` allows the name.
        patterns: schemas of other arguments, by a regular expression that must match a part of the name.
        other: the schema of all remaining arguments; None: the schema does not mention other arguments.
        least, most: bounds of the number of arguments; None: no bound.
    """

    named: Mapping[str, Any]
    is_listed: bool = False
    required: tuple[str, ...] = ()
    patterns: Mapping[str, Any] | None = None
    other: Any = None
    least: int = 0
    most: int | None = None

    def of(self, name: str) -> Any:
        """Returns the schema of the argument `name`. For a name outside of `named`, returns `other`; but if there are
        patterns, or if `other` is None, returns True (any value)."""
        return self.named.get(name, True if self.other is None or self.patterns else self.other)


class Forms:
    """The forms of the arguments of a function.

    Args:
        about: the owner of the schema, for error messages.
        root: the whole schema.
        budget: the budget of the request.
    """

    def __init__(self, about: str, root: Mapping[str, Any], budget: Budget) -> None:
        self._about = about
        self._root = root
        self._budget = budget
        self._types_of = TypesOf(root, lambda: budget.spend(about))

    def of(self, schema: object, depth: int = 0) -> list[Form]:
        self._budget.spend(self._about)
        if depth > _DEEPEST:
            raise refused(self._about, "refer to themselves, or are nested too deeply")
        if isinstance(schema, bool):
            return [Form({})] if schema else []
        if not isinstance(schema, Mapping):
            raise refused(self._about, f"have {show(schema)}; give a JSON schema")
        if (unknown := unknown_type(schema)) is not None:
            raise refused(self._about, f'are of type {show(unknown)}; give "object"')
        found = [self._own(schema)] if "object" in self._types_of(schema) else []
        if isinstance(reference := schema.get("$ref"), str):
            target = referred(reference, self._root)
            if target is None:
                raise refused(self._about, f"have the $ref {show(reference)}, which the schema does not have")
            found = self._both(found, self.of(target, depth + 1))
        for part in checked_parts(schema, "allOf", self._about):
            found = self._both(found, self.of(part, depth + 1))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                each = [self.of(part, depth + 1) for part in checked_parts(schema, key, self._about)]
                self._check_number(sum(map(len, each)))
                if key == "oneOf":
                    self._check_apart(each)
                found = self._both(found, list(itertools.chain(*each)))
        for values in lists_of_values(schema):
            found = self._both(found, [_form_of(each) for each in values if isinstance(each, Mapping)])
        return found

    def _own(self, schema: Mapping[str, Any]) -> Form:
        """Returns the form of a schema's own keywords. Ignores $ref, allOf, anyOf and oneOf."""
        named, patterns = self._by_name(schema, "properties"), self._by_name(schema, "patternProperties")
        required = schema.get("required", ())
        if not isinstance(required, (list, tuple)) or not all(isinstance(each, str) for each in required):
            raise refused(self._about, f"have {show(required)} for required; give a list of names")
        if patterns and (named or required):
            raise refused(self._about, "have patternProperties beside other names, which this notation cannot express")
        self._budget.spend(self._about, len(named) + len(patterns))
        return Form(
            named,
            "properties" in schema,
            tuple(required),
            patterns or None,
            schema.get("additionalProperties"),
            count(schema, "minProperties", self._about) or 0,
            count(schema, "maxProperties", self._about),
        )

    def _by_name(self, schema: Mapping[str, Any], key: str) -> dict[str, Any]:
        given = schema.get(key, {})
        if not isinstance(given, Mapping):
            raise refused(self._about, f"have {show(given)} for {key}; give schemas by name")
        return dict(given)

    def _both(self, some: list[Form], others: list[Form]) -> list[Form]:
        self._check_number(len(some) * len(others))
        return [self._met(one, other) for one in some for other in others]

    def _check_number(self, n_forms: int) -> None:
        if n_forms > _MOST_FORMS:
            raise refused(self._about, f"have more than {_MOST_FORMS} combinations of anyOf and oneOf")

    def _met(self, one: Form, other: Form) -> Form:
        names = [*one.named, *one.required, *other.named, *other.required]
        if (one.patterns or other.patterns) and (names or (one.patterns and other.patterns)):
            raise refused(self._about, "have patternProperties beside other names, which this notation cannot express")
        self._budget.spend(self._about, len(one.named) + len(other.named))
        counts = [each for each in (one.most, other.most) if each is not None]
        patterns = [
            {pattern: _both(schema, True if beside.other is None else beside.other) for pattern, schema in own.items()}
            for own, beside in ((one.patterns, other), (other.patterns, one))
            if own
        ]
        return Form(
            {name: _both(one.of(name), other.of(name)) for name in (*one.named, *other.named)},
            one.is_listed or other.is_listed,
            tuple(dict.fromkeys((*one.required, *other.required))),
            patterns[0] if patterns else None,
            other.other if one.other is None else one.other if other.other is None else _both(one.other, other.other),
            max(one.least, other.least),
            min(counts, default=None),
        )

    def _check_apart(self, each: Sequence[Sequence[Form]]) -> None:
        """Raises SamplingError if the same arguments may fit two schemas of a oneOf. `each`: the forms of each
        schema."""
        for some, others in itertools.combinations(each, 2):
            if not all(self._are_apart(one, other) for one in some for other in others):
                raise refused(
                    self._about, "have a oneOf of which two parts may fit at once; give anyOf, or a const to each"
                )

    def _are_apart(self, one: Form, other: Form) -> bool:
        return any(self._exclude(one.of(name), other.of(name)) for name in {*one.required, *other.required})

    def _exclude(self, one: object, other: object) -> bool:
        """Returns True if it is certain that no value fits both schemas."""
        if one is False or other is False:
            return True
        if not self._types_of(one) & self._types_of(other):
            return True
        lists, other_lists = (
            list(lists_of_values(schema)) if isinstance(schema, Mapping) else [] for schema in (one, other)
        )
        return any(
            not any(value in others for value in values) for values in lists for others in other_lists
        )  # 0 == False in Python, so 0 and False count as the same value


def _both(one: object, other: object) -> object:
    """Returns the schema of the values that fit both schemas."""
    if one is True or json.dumps(one) == json.dumps(other):  # as JSON, because 0 == False in Python
        return other
    return one if other is True else {"allOf": [one, other]}


def _form_of(value: Mapping[str, Any]) -> Form:
    return Form({name: {"const": each} for name, each in value.items()}, True, tuple(value), None, False)


def arguments(
    rules: Rules,
    tags: Tags,
    number: int,
    function: str,
    root: Mapping[str, Any],
    check: Callable[[Sequence[str]], None],
    budget: Budget,
) -> str:
    """Adds the rules for all arguments of a function. Returns the expression that uses these rules.

    Args:
        number: part of the rules' names; no other function has this number.
        root: the schema of the arguments, as far as a grammar can express it.
        check: raises SamplingError for argument names that calls of the model's family cannot express.
        budget: the budget of the request.

    Raises:
        SamplingError: no arguments fit the schema, or a notation with tags cannot express the schema. The message names
            the part at fault.
    """
    about = f"{PARAMETERS} of {show(function)}"
    forms = [closed(form) for form in Forms(about, root, budget).of(root)]
    names = dict.fromkeys(name for form in forms for name in (*form.named, *form.required))
    check(list(names))
    values = Values(rules, tags.end, function, root, budget)
    made: list[str] = []
    tried: list[_Arguments] = []
    for k, form in enumerate(forms):
        rules.about = about
        tried.append(_Arguments(rules, tags, f"{number}_{k}", about, values, names))
        each = tried[-1].of(form)
        made += [] if each is None else [each]
    if not made:
        name = next((each.impossible for each in tried if each.impossible is not None), None)
        what = about if name is None else f"argument {show(name)} of {show(function)}"
        raise SamplingError(f"tools are refused: no value fits {what}")
    rules.about = about
    return made[0] if len(made) == 1 else f"({' | '.join(made)})"


def closed(form: Form) -> Form:
    """Returns the form with all required names added to `named`. If `other` is None, `other` becomes False if the form
    is listed or has patterns, and True if not."""
    named = {**form.named, **{name: form.of(name) for name in form.required if name not in form.named}}
    other = not (form.is_listed or form.patterns) if form.other is None else form.other
    return replace(form, named=named, other=other)


class _Arguments:
    """A writer of the rules of one form.

    Args:
        names: all names of all forms. Arguments that are not named in the schema cannot have one of these names.

    Attributes:
        impossible: the name of a required argument without a possible value; None: no such argument was found.
    """

    def __init__(self, rules: Rules, tags: Tags, place: str, about: str, values: Values, names: Iterable[str]) -> None:
        self._rules = rules
        self._tags = tags
        self._place = place
        self._about = about
        self._values = values
        self._names = [quoted(name) for name in names]
        self.impossible: str | None = None

    def of(self, form: Form) -> str | None:
        """Adds the rules for a form. Returns the expression that uses these rules; None: no arguments fit the form."""
        items: list[tuple[str, bool]] = []
        for k, (name, schema) in enumerate(form.named.items()):
            start = quoted(self._tags.key + name + self._tags.value)
            made = self._values.rule(f"{self._place}_{k}", name, start, schema)
            if made is not None:
                items.append((made, name in form.required))
            elif name in form.required:
                self.impossible = name
                return None
        free = " | ".join(self._free(form))
        n_required = sum(is_required for _, is_required in items)
        least, most = form.least - n_required, None if form.most is None else form.most - n_required
        if most is not None and most < 0:
            return None
        if least > 1 and free:
            raise refused(self._about, f"have minProperties {form.least}; required must then name all but one")
        self._rules.about = self._about
        if least <= 0 and (most is None or (most >= len(items) - n_required and not free)):
            parts = [text if is_required else f"({text})?" for text, is_required in items]
            return " ".join([*parts, f"({free})*" if free else ""]).strip() or '""'
        return self._counted(items, free, max(0, least), most)

    def _free(self, form: Form) -> Iterator[str]:
        """Yields rules of arguments that are not named in the schema: one for each pattern, then one for other
        names."""
        patterns = {pattern: f"({found_in_text(pattern)})" for pattern in form.patterns or ()}
        if len(patterns) * sum(map(len, patterns.values())) > MAX_CHARS:
            raise refused(self._about, f"have {len(patterns)} patternProperties, which are too many")
        schemas = [*(form.patterns or {}).values(), form.other]
        for k, schema in enumerate(schemas):
            if schema is False:
                continue
            others = [*self._names, *(term for j, term in enumerate(patterns.values()) if j != k)]
            terms = [f"/{NAME.regex}/", *list(patterns.values())[k : k + 1]]
            terms += [f"~({' | '.join(others)})"] if others else []
            name = self._rules.rule(f"NAME{self._place}_{k}", " & ".join(terms))
            # The text before the value is one terminal, as for a named argument, because the lexer cannot go back
            # between terminals.
            start = f"{quoted(self._tags.key)} {name} {quoted(self._tags.value)}"
            start = self._rules.rule(f"START{self._place}_{k}", start)
            made = self._values.rule(f"{self._place}_free{k}", "", start, schema)
            if made is not None:
                yield made

    def _counted(self, items: Sequence[tuple[str, bool]], free: str, least: int, most: int | None) -> str | None:
        """Adds rules that count the optional arguments. Each argument has one rule for each number of optional
        arguments before it."""
        n_counts = 1 + (least if most is None else most)
        if (len(items) + 1) * n_counts > _MOST_COUNTS:
            many = f"{len(items)} arguments up to {n_counts - 1}"
            raise refused(self._about, f"count {many}, by minProperties and maxProperties, which is too much")
        after: list[str | None] = []
        for n_before in range(n_counts):
            still = max(0, least - n_before), None if most is None else most - n_before
            if free and still[1] != 0:
                after.append(f"({free}){{{still[0]},{'' if still[1] is None else still[1]}}}")
            else:
                after.append(None if still[0] else '""')
        for k, (text, is_required) in reversed(list(enumerate(items))):
            here: list[str | None] = []
            for n_before in range(n_counts):
                follower = n_before + (not is_required)
                follower = follower if most is not None else min(follower, least)
                taken = after[follower] if follower < n_counts else None
                ways = [f"{text} {taken}"] if taken is not None else []
                if not is_required and after[n_before] is not None:
                    ways.append(str(after[n_before]))
                name = f"counted{self._place}_{k}_{n_before}"
                here.append(self._rules.rule(name, " | ".join(ways)) if ways else None)
            after = here
        return after[0]
