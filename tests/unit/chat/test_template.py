"""The input of a chat template: tools, variables, messages as OpenAI's API writes them."""

import functools
import itertools
import json
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from datetime import datetime

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llamabatch.chat import template as chat_template
from llamabatch.chat.conversation import render
from llamabatch.chat.options import ChatOptions
from llamabatch.chat.template import BoundedTemplate
from llamabatch.errors import ConfigError, PromptError

TEMPLATE = r"""
{%- if tools %}{{ "TOOLS " }}{{ tools | tojson }}{{ "\n" }}{% endif %}
{%- for m in messages %}
{{- m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}
{{- " CALL " + call.function.name + " " }}{{ call.function.arguments | tojson }}
{%- endfor %}
{{- "\n" }}
{%- endfor %}
{%- if enable_thinking %}THINK{% endif %}
{%- if add_generation_prompt %}assistant:{% endif %}"""
HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def text(conversation=HI, template=TEMPLATE, **options):
    return render(template, conversation, "", "", ChatOptions(**options))


def test_tools_reach_the_template():
    assert text(tools=[WEATHER]) == f"TOOLS {json.dumps([WEATHER])}\nuser: hi\nassistant:"


@pytest.mark.parametrize("tools", ["weather", {"function": {}}, [5], [{"function": {}}], [{"name": "weather"}]])
def test_what_are_no_tools_is_refused(tools):
    with pytest.raises(PromptError, match="tool"):
        text(tools=tools)


@pytest.mark.parametrize(
    "function",
    [
        {"parameters": {"type": "string"}},
        {"parameters": {"anyOf": [{"type": "array"}, {"type": "null"}]}},
        {"parameters": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}},
        {"parameters": []},
        {"strict": "yes"},
    ],
)
def test_a_function_whose_arguments_cannot_be_an_object_is_refused(function):
    with pytest.raises(PromptError, match=r"JSON schema of an object|strict of 'weather' is 'yes'; give True or False"):
        text(tools=[{"function": {"name": "weather", **function}}])


def test_a_strict_function_leaves_the_arguments_of_the_others_free():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    strict, loose = ({"function": {"name": n, "parameters": schema, "strict": n == "s"}} for n in "sl")
    assert ChatOptions([strict, loose]).free_schemas == {"s": schema, "l": {"type": "object"}}
    assert ChatOptions([strict, loose]).strict_tools == {"s"}
    assert not ChatOptions([loose]).strict_tools


def test_variables_reach_the_template():
    assert text(kwargs={"enable_thinking": True}) == "user: hi\nTHINKassistant:"
    assert text(add_generation_prompt=False) == "user: hi\n"
    assert text(template="{{ what.ever[1] }}", kwargs={"what": {"ever": [1, "yes"]}}) == "yes"


def test_reserved_names_and_values_that_are_not_plain_are_refused():
    for name in ("messages", "bos_token", "raise_exception", *chat_template._Environment().globals):
        with pytest.raises(PromptError, match=f"has '{name}', which cannot be set"):
            ChatOptions(kwargs={name: 1})
    for name in ("tools", "add_generation_prompt", "continue_final_message"):
        with pytest.raises(PromptError, match=rf"give chat\(..., {name}=…\)"):
            ChatOptions(kwargs={name: True})
    with pytest.raises(PromptError, match="give a mapping"):
        ChatOptions(kwargs=[1])
    for name in (5, "a b", ""):
        with pytest.raises(PromptError, match="no name of a variable"):
            ChatOptions(kwargs={name: 1})
    nested: list[object] = []
    for _ in range(70):
        nested = [nested]
    doubled: list[object] = [1]
    for _ in range(40):
        doubled = [doubled, doubled]
    for value, says in (
        (print, "holds <built-in function print>; give values as in JSON"),
        ([{"a": {1, 2}}], "give values as in JSON"),
        (nested, "nested more than 64 deep"),
        (doubled, "holds more than 1,048,576 values"),
    ):
        with pytest.raises(PromptError, match=says):
            ChatOptions(kwargs={"documents": value})


def test_what_the_template_does_not_read_is_refused():
    with pytest.raises(PromptError, match="does not know 'documents'"):
        text(kwargs={"documents": []})
    with pytest.raises(PromptError, match=r"does not know 'enable_thinkin'.*did you mean 'enable_thinking'"):
        text(kwargs={"enable_thinkin": True})
    with pytest.raises(PromptError, match="does not know 'add_generation_prompt'"):
        text(template="{{ messages[0].content }}", add_generation_prompt=False)


def test_what_transformers_marks_for_training_is_text_like_any_other():
    template = (
        "{% set x = 1 %}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 2 %}"
        "{{ m.content }}{{ x }}{{ loop.index }}\n{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ x }}"
        "{% endfor %}"
    )
    conversation = [*HI, {"role": "assistant", "content": "ho"}]
    assert text(conversation, template) == "hi1ho22\n1"
    assert text(conversation, template, continue_final_message=True) == "hi1ho"
    endless = "{% for a in range(99999) %}{% generation %}" * 2 + "x" + "{% endgeneration %}{% endfor %}" * 2
    with pytest.raises(PromptError, match="it takes more than the"):
        text(template=endless)
    with pytest.raises(ConfigError, match="cannot be compiled"):
        text(template="{% generation %}")


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("a\n{% if %}", "line 2: Expected an expression, got 'end of statement block'"),
        ("a\nb\n{{ x | nonsense }}", "line 3: No filter named 'nonsense'."),
        ("{{ x", "line 1: unexpected end of template, expected 'end of print statement'."),
    ],
)
def test_an_error_of_syntax_names_its_line(source, fault):
    with pytest.raises(ConfigError) as caught:
        text(template=source)
    assert str(caught.value) == f"the chat template cannot be compiled: {fault}"


def test_content_in_parts_and_calls_of_tools():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    conversation = [
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
    ]
    got = text(conversation)
    assert got == 'user: a\nb\nassistant:  CALL weather {"city": "Oslo"}\ntool: rain\nassistant:'
    assert call["function"]["arguments"] == '{"city": "Oslo"}', "the caller's message is left as it was"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": 5}, r"content of messages\[0\] is 5"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "type 'image_url'; give parts of text"),
        ({"role": "user", "content": ["a"]}, r"content of messages\[0\] has the part 'a'; give parts of text"),
        ({"role": "assistant", "tool_calls": [{"name": "x"}]}, r"a tool call of messages\[0\] is"),
        ({"role": "usr", "content": "a"}, r"role of messages\[0\] is 'usr'; did you mean 'user'\?"),
        ({"role": "Assistant", "content": "a"}, "did you mean 'assistant'"),
        ({"role": 5, "content": "a"}, r"messages\[0\] has the role 5; a message is"),
        ({"content": "a"}, r"messages\[0\] has no role; a message is"),
        ({"role": "user"}, r"messages\[0\] has no content; a message is"),
        (["user", "a"], r"messages\[0\] is \['user', 'a'\]; a message is"),
    ],
)
def test_bad_messages_say_what_is_wrong(message, says):
    with pytest.raises(PromptError, match=says):
        text([message])


def test_a_role_is_what_the_template_names_or_no_slip_of_a_known_one():
    message = [{"role": "tol", "content": "a"}]
    with pytest.raises(PromptError, match="did you mean 'tool'"):
        render("{% for m in messages %}{{ m.role }}{% endfor %}", message, "", "")
    assert render("{% for m in messages if m.role == 'tol' %}{{ m.role }}{% endfor %}", message, "", "") == "tol"
    for role in ("developer", "function", "ipython", "critic", "tool_call", "function_call", "user2", "superuser", ""):
        assert render("{{ messages[0].role }}", [{"role": role, "content": "a"}], "", "") == role


def test_a_refusal_is_text():
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Sorry."}]}
    assert text([*HI, said, *HI]) == "user: hi\nassistant: No.\nSorry.\nuser: hi\nassistant:"


def test_no_system_message_is_lost_where_a_template_writes_the_last_one_alone():
    template = (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
        "{% endif %}{% endfor %}{{ ns.s }}|{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    system = [{"role": "system", "content": content} for content in ("Be short.", "Be kind. ")]
    assert text([*system, *HI], template) == "Be short.\n\nBe kind. |hi"
    assert text([system[0], *HI], template) == "Be short.|hi"
    assert text([*system, *HI], "{{ messages[0].content[:2] }}") == "Be"  # no whole system message in any form


# --- bounds ---------------------------------------------------------------------------------------------------------


def grows(step, start="'a'", end="", times=99):
    """Returns a template that sets ns.t to the expression `step` of ns.t, again and again."""
    loop = f"{{% for a in range({times}) %}}{{% set ns.t = {step} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(t={start}) %}}{loop}{end}"


def web(end, step="[ns.t, ns.t]", start="[1]"):
    """Returns a template whose list has few objects, but 2**60 if each counts as often as it occurs."""
    return grows(step, start, end, times=60)


# Without bounds, each of these runs forever, takes all memory or ends the process.
BOMBS = {
    "three loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
        "{% endfor %}{% endfor %}"
    ),
    "loops that filter": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "doubling by ~": grows("ns.t ~ ns.t"),
    "doubling by +": grows("ns.t + ns.t"),
    "doubling by a macro": "{% macro m(t) %}{{ t }}{{ t }}{% endmacro %}" + grows("m(ns.t)"),
    "doubling by format": grows("'{0}{0}'.format(ns.t)"),
    "doubling by format_map": grows("'{a}{a}'.format_map({'a': ns.t})"),
    "doubling by percent": grows("'%(a)s%(a)s' % {'a': ns.t}"),
    "doubling by the filter format": grows("'%s%s'|format(ns.t, ns.t)"),
    "doubling of escapes": grows("ns.t|forceescape ~ ns.t", start="'&'"),
    "doubling by tojson": grows("ns.t|tojson", start="'\\\\\\\"'"),
    "an output bomb": "{% set t = 'a' * 100000 %}{% for a in range(99999) %}{{ t }}{% endfor %}",
    "output of constants": (
        "{% for a in range(99999) %}{% for a in range(99) %}" + "a" * 5000 + "{% endfor %}{% endfor %}"
    ),
    "times": "{{ 'a' * 10**10 }}",
    "times from the left": "{{ 10**10 * 'a' }}",
    "times of a list": "{{ ([1] * 10**9)|length }}",
    "power": "{{ 9**(9**9) }}",
    "squares": grows("ns.t * ns.t", start="3"),
    "a number from a text": "{% set n = ('f' * 20000000)|int(base=16) %}{{ n // 3 }}",
    "a literal": "{% set n = 0x" + "f" * 200000 + " %}{{ n * n }}",
    "center": "{{ 'a'|center(10**10) }}",
    "center while it compiles": "{{ 'a'|center(10000000000) }}",
    "center while it compiles, in autoescape": "{% autoescape 'a'|center(10000000000) %}{% endautoescape %}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ ('\\t' * 1000).expandtabs(10**8) }}",
    "indent": "{{ ('a\\n' * 100000)|indent(10**6) }}",
    "indent by a text": "{{ ('a\\n' * 100000)|indent('a' * 1000000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 100000) }}",
    "the filter replace": "{{ ('a' * 1000000)|replace('a', 'b' * 100000) }}",
    "replace of nothing": "{{ ('a' * 1000000).replace('', 'b' * 100000) }}",
    "join": "{{ ('b' * 100000).join(['a'] * 1000000) }}",
    "the filter join": "{{ (['a'] * 1000000)|join('b' * 100000) }}",
    "join of a generator": "{{ ('b' * 100000).join(range(99999)|map('string')) }}",
    "join of one text": "{% set t = 'a' * 1000000 %}{{ range(99999)|map('replace', '', t)|join }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "precision": "{{ '%.2000000000f' % 1 }}",
    "is even": "{{ '%10000000000d' is even }}",
    "is divisible": "{{ '%10000000000d' is divisibleby(3) }}",
    "str.format by a value": "{{ '{:{}}'.format(1, 10**10) }}",
    "str.format by attr": "{{ ('{:10000000000}'|attr('format'))(1) }}",
    "str.format of Markup": "{{ ('{:10000000000}'|safe).format(1) }}",
    "str.format in map": "{{ [1]|map('{:10000000000}'.format)|list }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 100000}) }}",
    "fromkeys": "{{ {}.fromkeys(range(99999)) }}" * 90 + "{{ 9**9**9 }}",
    "round": "{{ 1.5|round(10**9, 'ceil') }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "tojson with indent": "{{ (range(9999)|list)|tojson(indent=10**6) }}",
    "tojson with an indent of text": "{{ (range(9999)|list)|tojson(indent='a' * 1000000) }}",
    "tojson with separators": "{{ (range(99999)|list)|tojson(separators=('a' * 1000000, ':')) }}",
    "sum of lists": "{{ (range(99999)|batch(1)|list)|sum(start=[]) }}",
    "list of a text": "{{ ('a' * 60000000)|list|length }}",
    "split": "{{ ('a ' * 30000000).split()|length }}",
    "slices": "{% set t = 'a' * 10000000 %}{% for a in range(99999) %}{% set b = t[1:] %}{% endfor %}",
    "slices of lists": "{% set t = [1] * 1000000 %}{% for a in range(99999) %}{% set b = t[::-1] %}{% endfor %}",
    "finds": "{% set t = 'a' * 10000000 %}{% for a in range(99999) %}{% set b = t.find('b') %}{% endfor %}",
    "in": "{% set t = 'a' * 10000000 %}{% for a in range(99999) %}{% set b = 'b' in t %}{% endfor %}",
    "in a list": "{% set t = [1] * 100000 %}{% for a in range(99999) %}{% set b = 2 in t %}{% endfor %}",
    "in a generator": (
        "{% set t = 'a' * 9999999 %}{% set u = 'a' * 9999998 ~ 'b' %}{% for a in range(9999) %}"
        "{{ t in ([[u]] * 999)|map(attribute=0) }}{% endfor %}"
    ),
    "a web of lists": web("{{ ns.t }}"),
    "a web, by ~": web("{{ 'a' ~ ns.t }}"),
    "a web as JSON": web("{{ ns.t|tojson }}"),
    "webs compared": (
        "{% set ns = namespace(t=[1], u=[1]) %}{% for a in range(60) %}{% set ns.t = [ns.t, ns.t] %}"
        "{% set ns.u = [ns.u, ns.u] %}{% endfor %}{{ ns.t == ns.u }}"
    ),
    "a web as a key": web("{{ {}[ns.t] }}", "(ns.t, ns.t)", "(1,)"),
    "a web as a key of a literal": web("{{ {ns.t: 1} }}", "(ns.t, ns.t)", "(1,)"),
    "a web as a filter's name": web("{{ [1]|map(ns.t)|list }}", "(ns.t, ns.t)", "(1,)"),
    "a web in dict": web("{{ dict([[ns.t, 1]]|map('list')) }}", "(ns.t, ns.t)", "(1,)"),
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "macros in macros": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that doubles": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "loops in loops": "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "a block in itself": "{% block b %}{{ self.b() }}{% endblock %}",
    "include": "{% include 'a' %}",
    "a chain of generators": (
        "{% set ns = namespace(g=[1]) %}{% for b in range(9) %}{% for a in range(99999) %}"
        "{% set ns.g = ns.g|map('string') %}{% endfor %}{% endfor %}{{ ns.g|list }}"
    ),
    "a chain of lists": (
        "{% set ns = namespace(g=[1]) %}{% for b in range(9) %}{% for a in range(99999) %}"
        "{% set ns.g = [ns.g] %}{% endfor %}{% endfor %}{{ ns.g }}"
    ),
    "a chain that is dropped": (
        "{% set ns = namespace(g=[1]) %}{% for b in range(4) %}{% for a in range(99999) %}"
        "{% set ns.g = ns.g|map('string') %}{% endfor %}{% endfor %}{% set ns.g = 1 %}{{ 9**9**9 }}"
    ),
    "lipsum": "{{ lipsum(10**6) }}",
    "pprint": "{{ [1]|pprint }}",
    "strftime": "{{ strftime_now('%1000000000d' * 20000) }}" * 9 + "{{ 9**9**9 }}",
    "lists kept": (
        "{% set ns = namespace(t=[]) %}{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% set ns.t = [ns.t, 'a' ~ b] %}{% endfor %}{% endfor %}"
    ),
    "a star call": (
        "{% set t = [1] * 1000000 %}{% macro m() %}{{ varargs|length }}{% endmacro %}"
        "{% for a in range(99999) %}{{ m(*t) }}{% endfor %}"
    ),
    "a call block": (
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call m() %}" * 40 + "a" + "{% endcall %}" * 40
    ),
    "the same word sought": (
        "{% set t = 'a' * 1000000 %}{% set u = 'a' * 90 ~ 'b' %}{% for a in range(99999) %}{{ t.find(u) }}{% endfor %}"
    ),
    "wide letters": grows("ns.t ~ ns.t", start="'\U0001f600'"),
    "unique": "{% for a in range(99999) %}{{ range(99999)|unique|list|length }}{% endfor %}",
    "a long path of attributes": (
        "{% set ns = namespace() %}{% set ns.a = ns %}"
        "{{ ([ns] * 99999)|map(attribute='a.' * 20000 ~ 'a')|list|length }}"
    ),
    "a long key to sort by": (
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ([ns] * 9999)|sort(attribute='a.a,' * 20000 ~ 'a')|length }}"
    ),
    "a star call of a text": "{% macro m() %}{{ varargs|length }}{% endmacro %}{{ m(*('\U0001f600' * 30000000)) }}",
    "a text joined": "{{ ','.join('\U0001f600' * 30000000)|length }}{{ ('\U0001f600' * 30000000)|join|length }}",
    "a title": "{{ ('a ' * 60000000)|title|length }}",
    "escapes": "{% autoescape true %}{{ '&' * 100000000 }}{% endautoescape %}",
    "escapes by Markup": "{{ (('' | safe) + '&' * 100000000)|length }}",
    "escapes by Markup.join": "{{ (('' | safe).join(['&' * 100000000]))|length }}",
}

RUN_BOMBS = """
import gc, json, resource, sys, time
from llamabatch.chat.conversation import render

resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30,) * 2)
gc.disable()  # the peak is to be that of one template: what it had is freed with its error
for name, template in json.load(sys.stdin).items():
    start = time.thread_time()
    try:
        said = "rendered: " + render(template, [{"role": "user", "content": "hi"}], "", "")[:100]
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps([name, said, time.thread_time() - start]), flush=True)
# Linux counts what the process was forked from in ru_maxrss
try:
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    peak = int(lines["VmHWM"].split()[0]) * 1024
except (OSError, KeyError):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps(["peak", peak, 0]))
"""


LONG = [  # each takes more than a second, so it runs in a child process of its own
    "a macro that doubles", "a chain of generators", "a chain of lists", "a chain that is dropped", "lists kept",
    "a call block", "a long path of attributes",
]  # fmt: skip


def run_bombs(names, folder):
    """Runs templates in a child process. Returns what became of each.

    A template that is not bounded is missing, and so are the templates after it.
    """
    bombs = json.dumps({name: BOMBS[name] for name in names})
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUN_BOMBS], input=bombs, capture_output=True, text=True, timeout=300, cwd=folder
        )
        lines = done.stdout
    except subprocess.TimeoutExpired as late:
        lines = (late.stdout or b"").decode()
    return {name: (said, seconds) for name, said, seconds in map(json.loads, lines.splitlines())}


@pytest.fixture(scope="module")
def quick_ones(tmp_path_factory):
    """Returns what became of all templates that are not in LONG."""
    return run_bombs(BOMBS.keys() - {*LONG}, tmp_path_factory.mktemp("bombs"))


@pytest.fixture
def ended(request, tmp_path):
    """Returns what became of the templates that ran together with the one that the test names."""
    name = request.getfixturevalue("name")
    return run_bombs([name], tmp_path) if name in LONG else request.getfixturevalue("quick_ones")


@pytest.mark.parametrize("name", BOMBS)
def test_no_template_takes_all_time_or_memory(name, ended):
    assert name in ended, "it ended the process, or ran for ever"
    said, seconds = ended[name]
    assert said.startswith(("PromptError: the chat template ", "ConfigError: the chat template "))
    assert len(said) < 700
    assert not said.endswith(": "), "it says why"
    assert seconds < 60  # processor time of the thread; 3 s on a quiet machine
    assert ended["peak"][0] < 2**29


@pytest.mark.parametrize("opening", ["{{ " + "(" * 5000, "{% if x %}" * 3000, "{{ " + "[" * 900, "{{ " + "not " * 5000])
def test_a_template_that_nests_deeply_cannot_be_compiled(opening):
    with pytest.raises(ConfigError, match=r"the chat template cannot be compiled: ."):
        text(template=opening)
    with pytest.raises(ConfigError, match="cannot be compiled: it nests too deeply"):
        text(template="{{ 1" + " + 1" * 5000 + " }}")


def test_a_template_that_is_too_long_is_refused_before_it_is_compiled():
    with pytest.raises(ConfigError, match="has 300,007 characters; allowed are up to 262,144"):
        text(template="{{ 1 }}" + "a" * 300_000)


def test_a_lack_of_memory_says_so(monkeypatch):
    def render(self, variables, cancelled):
        raise MemoryError

    monkeypatch.setattr(BoundedTemplate, "render", render)
    with pytest.raises(PromptError, match=r"refuses this conversation: it runs out of memory$"):
        text()


def test_a_template_is_left_as_soon_as_nothing_waits_for_it(monkeypatch):
    monkeypatch.setattr(chat_template, "BUDGET", 2**60)
    monkeypatch.setattr(chat_template, "MAX_BUDGET", 2**60)
    asked = []

    def cancelled():
        asked.append(time.thread_time())  # processor time, so other programs do not matter
        return len(asked) == 20

    for template in (BOMBS["three loops"], BOMBS["a macro that doubles"], BOMBS["loops that filter"]):
        asked.clear()
        with pytest.raises(CancelledError):
            render(template, HI, "", "", cancelled=cancelled)
        assert max(b - a for a, b in itertools.pairwise(asked)) < 1, "seconds between two looks"


def test_what_a_template_may_take_grows_with_the_conversation():
    walks = (
        "{% for m in messages %}{% for n in messages %}{% if n.role == 'tool' %}x{% endif %}{% endfor %}{% endfor %}ok"
    )
    assert text(HI * 1200, walks) == "ok"
    assert text([{"role": "user", "content": "a" * 10_000_000}], "{{ messages[0].content * 4 }}") == "a" * 40_000_000


# Expressions of real templates -> their text in jinja2's own sandbox, without bounds.
IDIOMS = {
    "{{ messages|map(attribute='role')|join(',') }}": "user",
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}": "1",
    "{% if messages|selectattr('role', 'equalto', 'tool') %}always{% endif %}": "always",
    "{{ (messages|last).content.split('</think>')[-1].lstrip('\\n')|trim }}": "hi",
    "{% for m in messages[::-1] %}{{ loop.index0 }}{{ loop.last }}{{ m['content'][:1] }}{% endfor %}": "0Trueh",
    "{% set ns = namespace(a=1, b='x') %}{% set ns.a = ns.a + 2 * 3 %}{{ ns.a }}{{ ns.b ~ 1 ~ none }}": "7x1None",
    "{% macro m(a, b=2) %}{{ a }}-{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}": "1-2",
    "{{ '%s and %5.1f' % ('a', 2) }}{{ '{} {:>3}'.format('b', 'c') }}": "a and   2.0b   c",
    "{{ {'a': [1, 'ü']}|tojson }}{{ [1]|tojson(indent=2) }}": '{"a": [1, "ü"]}[\n  1\n]',
    "{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}{{ v }}{% endfor %}": "a2b1",
    "{% for k, v in {'b': 1}.items() if v == 1 %}{{ k }}{% else %}none{% endfor %}": "b",
    "{{ 'a' in 'cat' }}{{ 'role' in messages[0] }}{{ 1 in [1, 2] }}{{ 1 < 2 < 3 }}": "TrueTrueTrueTrue",
    "{% set x %}{% for i in range(3) %}{{ i }}{% if i %}{% break %}{% endif %}{% endfor %}{% endset %}{{ x }}": "01",
    "{% filter upper %}a{{ 'b' }}{% endfilter %}{{ 'x'|indent(2, true) }}": "AB  x",
    "{{ '<b>'|e }}{{ ('<b>'|safe) ~ '<' }}{{ 'a-b'.replace('-', '_')|title }}": "&lt;b&gt;<b><A_b",
    "{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 5 }}{{ -1 }}{{ 1.5|round|int }}{{ '12'|int + 1 }}": "3132-1213",
    "{% for a in [[1, [2]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}": "12",
    "{{ messages[0].get('tool_calls', 'no') }}{{ messages[0].no is defined }}{{ nothing|default('d') }}": "noFalsed",
    "{{ [3, 1, 2]|sort|first }}{{ [1, 2]|sum }}{{ [1, 1]|unique|list }}{{ 'abc'|reverse }}": "13[1]cba",
    "{{ strftime_now('%Y')|length }}{{ range(3)|list }}{{ 'x'.center(3) }}|": "4[0, 1, 2] x |",
    "{{ cycler('a', 'b').next() }}{% set j = joiner(',') %}{{ j() }}{{ j() }}{{ dict(a=1).a }}": "a,1",
}


@pytest.mark.parametrize("template", IDIOMS)
def test_what_templates_do_every_day_is_what_jinja_makes_of_it(template):
    stock = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    stock.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    stock.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    assert text(template=template) == IDIOMS[template] == stock.from_string(template).render(messages=HI)


# As templates of Gemma, Mistral and Qwen3.5 do: only the first message may be a system message, and roles alternate.
DEMANDING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('twice') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)


def test_a_template_that_refuses_late_system_messages_and_turns_of_one_role_gets_them_joined():
    def said(*roles):
        return [{"role": role, "content": str(n)} for n, role in enumerate(roles)]

    of_codex = said("system", "system", "user", "user", "assistant")
    assert render(DEMANDING, of_codex, "", "") == "[system:0\n\n1][user:2\n\n3][assistant:4]"
    of_claude = said("system", "user", "system", "assistant", "user")
    assert render(DEMANDING, of_claude, "", "") == "[system:0][user:1\n\n2][assistant:3][user:4]"
    assert render(DEMANDING, said("user", "assistant", "assistant"), "", "") == "[user:0][assistant:1\n\n2]"
    taking = DEMANDING.replace("raise_exception('late')", "''").replace("raise_exception('twice')", "''")
    assert render(taking, of_codex, "", "") == "[system:0][system:1][user:2][user:3][assistant:4]"
