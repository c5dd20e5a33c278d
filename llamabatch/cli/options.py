"""Options that several commands share. The engine's options are generated from the fields of EngineConfig."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import click

from llamabatch.cli.param_types import (
    UNSET,
    AutoInt,
    Bias,
    File,
    ModelName,
    OrNone,
    Param,
    ScaledFile,
    Shares,
    Tags,
    Text,
    Texts,
)
from llamabatch.config import CHOICES, EngineConfig
from llamabatch.errors import ContextLengthError, SamplingError
from llamabatch.gguf.resolve import local
from llamabatch.request.json_schema import LENIENT
from llamabatch.request.sampling_params import OPEN, SamplingParams
from llamabatch.sampling.defaults import DEFAULTS
from llamabatch.utils.checks import show
from llamabatch.utils.paths import absolute

Command = Callable[..., Any]

MODEL_VARIABLE = "LLAMABATCH_MODEL"

model_option = click.option(
    "-m",
    "--model",
    default="tiny",
    type=ModelName(),
    envvar=MODEL_VARIABLE,
    show_default=True,
    callback=lambda ctx, param, value: value if ctx.resilient_parsing else local(value),
    help="Path of a .gguf file, 'tiny' for the bundled model, owner/repo:Q4_K_M on Hugging Face's hub, or the https "
    f"address of a file; not given: {MODEL_VARIABLE}.",
)

json_option = click.option(
    "--json", "json_file", type=File(), help="Write everything as JSON; '-': to stdout, instead of the table."
)

plot_option = click.option(
    "--plot", "plot_file", type=File(), help="Draw a picture: .png, .svg or .pdf. Needs llamabatch[tools]."
)

chat_template_option = click.option(
    "--chat-template",
    help="A file with a jinja2 template, its text, or a name as chatml, in place of the model's own chat template.",
)

lora_option = click.option(
    "--lora",
    "loras",
    type=ScaledFile(),
    multiple=True,
    help="A LoRA or control vector to apply, and its scale; may be given several times.",
)

# These fields get no generated option: --model and --lora are defined above, and --seed is a sampling option.
_NO_OPTIONS = ("model", "adapters", "seed")


_VALUES: dict[str, tuple[str, ...]] = {name: tuple(values) for name, values in CHOICES}


def engine_options(exclude: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Returns a decorator that adds an option for each field of EngineConfig except the excluded ones. The command
    receives a dict `engine` with the user's options."""
    chosen = [field for field in fields(EngineConfig) if field.name not in (*_NO_OPTIONS, *exclude)]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(**values: Any) -> Any:
            engine = {field.name: values.pop(field.name) for field in chosen}
            return command(engine={name: value for name, value in engine.items() if value is not None}, **values)

        return _with_options(wrapped, [_option(field) for field in chosen])

    return decorate


def _with_options(command: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    """Returns the command with these options. The help shows them in the given order."""
    for option in reversed(options):
        command = option(command)
    return command


def variable_of(name: str) -> str:
    """Returns the name of an option's environment variable. `name`: the name of the option's parameter."""
    return f"LLAMABATCH_{name.upper()}"


def engine_variables(command: click.Command) -> None:
    """Makes a command read the engine's options from environment variables such as LLAMABATCH_N_SLOTS."""
    names = {field.name for field in fields(EngineConfig)}
    for each in command.params:
        if isinstance(each, click.Option) and each.name in names and each.envvar is None:
            each.envvar = variable_of(each.name)


def _option(field: Field[Any]) -> Callable[[Command], Command]:
    flag = "--" + field.name.replace("_", "-")
    default = "" if field.default in (None, ()) else f"  [default: {str(field.default).lower()}]"
    text = field.metadata["help"] + default
    # click's default is None for each option, because the library chooses the value of an option that is not given.
    if isinstance(field.default, bool):
        return click.option(f"{flag}/--no-{flag[2:]}", field.name, default=None, help=text)
    kind: Any = str  # for fields without a type below; EngineConfig parses their texts
    if field.name in _VALUES:
        kind = Text(_VALUES[field.name])
    elif field.name in ("draft_model", "mmproj"):
        kind = ModelName()
    elif field.name == "tensor_split":
        kind = Shares()
    elif field.name == "reasoning_tags":
        kind = Tags()
    elif field.default == "auto" and "int" in str(field.type):
        kind = AutoInt("fit") if field.name == "n_ctx" else AutoInt()
    elif str(field.type).startswith("int"):
        kind = int
    elif str(field.type).startswith("float"):
        kind = float
    return click.option(flag, field.name, type=kind, default=None, help=text)


_DEFAULTS = {f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING}


def _help(text: str, name: str) -> str:
    default = f"the model's, else {DEFAULTS[name]}" if name in OPEN else _DEFAULTS[name]
    return f"{text}  [default: {default}]"


_WHOLE, _NUMBER = OrNone(int), OrNone(float)
_TEMPERATURE = click.option(
    "-t", "--temperature", type=_NUMBER, help=_help("0: always the likeliest token.", "temperature")
)
_SHORT = (
    click.option("-n", "--max-tokens", type=_WHOLE, help=_help("Tokens to generate at most.", "max_tokens")),
    _TEMPERATURE,
)
_OF_CHAT = (
    click.option("-n", "--max-tokens", type=_WHOLE, help="Tokens of an answer at most.  [default: as n_ctx allows]"),
    _TEMPERATURE,
)
_LONG = (
    click.option("--max-tokens", type=_WHOLE, help=_help("Tokens to generate at most.", "max_tokens")),
    click.option("--temperature", type=_NUMBER, help=_help("0: always the likeliest token.", "temperature")),
)
_SAMPLING_OPTIONS = (
    click.option("--top-k", type=_WHOLE, help=_help("Draw from the k likeliest tokens.", "top_k")),
    click.option("--top-p", type=_NUMBER, help=_help("Draw from the likeliest tokens that together have p.", "top_p")),
    click.option(
        "--min-p", type=_NUMBER, help=_help("Draw from tokens with at least p times the best probability.", "min_p")
    ),
    click.option(
        "--repetition-penalty",
        type=_NUMBER,
        help=_help("Above 1: makes tokens of prompt and output less likely.", "repetition_penalty"),
    ),
    click.option(
        "--presence-penalty",
        type=_NUMBER,
        help=_help("Subtracted from the logit of each token of the output.", "presence_penalty"),
    ),
    click.option(
        "--frequency-penalty",
        type=_NUMBER,
        help=_help("Subtracted from a token's logit once for each time that it is in the output.", "frequency_penalty"),
    ),
    click.option(
        "--logit-bias", type=Bias(), multiple=True, help="Added to the logit of a token; may be given several times."
    ),
    click.option(
        "-P",
        "--param",
        "others",
        type=Param(),
        multiple=True,
        help="""Any other field of SamplingParams, its value as JSON: -P n=2 -P bad_words='["foo"]'; see """
        "docs/names.md.",
    ),
    click.option("--seed", type=int, help="Same seed, same text; without one each run differs."),
    click.option("--stop", multiple=True, help="End the text before this string; may be given several times."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on after an end-of-generation token."),
)
_SAMPLING_NAMES = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "stop", "ignore_eos"),
)

_FORM_OPTIONS = (
    click.option("--json-schema", help="Answers are JSON of this schema: a file, or its text."),
    click.option("--choice", type=Texts(), help="Answers are one of these texts: 'positive,negative'."),
    click.option("--regex", help="Answers match this regular expression."),
    click.option("--lenient", is_flag=True, help="Leave out the parts of the schema that no grammar enforces."),
)
_CURE = "; the options for this are -P overflow=truncate, and --n-ctx up to what the model was trained for"
_FORMS = ("structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def sampling_options(command: Command, short: bool = True, is_chat: bool = False) -> Command:
    """Adds the sampling options. The command receives the given fields of SamplingParams as a dict in `sampling`.

    Args:
        short: add -n and -t as well, which mean something else in llama-server.
        is_chat: the help says that without --max-tokens only n_ctx limits the length of an answer.
    """

    @functools.wraps(command)
    def wrapped(others: tuple[tuple[str, Any], ...], **values: Any) -> Any:
        given = {name: values.pop(name) for name in _SAMPLING_NAMES}
        given = {name: value for name, value in given.items() if value is not None and value != ()}
        given = {name: None if value is UNSET else value for name, value in given.items()}
        for name, value in others:
            if name in given:
                raise click.UsageError(f"{name} is given twice; give it once")
            given[name] = value
        try:
            return command(sampling=given, **values)
        except ContextLengthError as error:
            raise ContextLengthError(f"{error}{_CURE}") from None

    return _with_options(wrapped, (*(_OF_CHAT if is_chat else _SHORT if short else _LONG), *_SAMPLING_OPTIONS))


def form_options(command: Command) -> Command:
    """Adds --json-schema, --choice, --regex and --lenient. The command gets them as `structured_outputs` in `sampling`.

    This decorator must stand below `sampling_options`.
    """

    @functools.wraps(command)
    def wrapped(
        sampling: dict[str, Any], json_schema: str | None, choice: tuple[str, ...] | None, regex: str | None,
        lenient: bool, **values: Any,
    ) -> Any:  # fmt: skip
        if (form := _form(json_schema, choice, regex)) is not None:
            if any(name in sampling for name in _FORMS):
                raise click.UsageError("the structure of the answers is given twice: by an option and by -P")
            sampling["structured_outputs"] = form
        if lenient and json_schema is None:
            raise click.UsageError("--lenient needs --json-schema")
        if lenient:
            sampling["structured_outputs"]["lenient"] = True
        try:
            return command(sampling=sampling, **values)
        except SamplingError as error:
            if json_schema is None or LENIENT not in str(error):
                raise
            raise SamplingError(str(error).replace(LENIENT, "--lenient")) from None

    return _with_options(wrapped, _FORM_OPTIONS)


def _form(json_schema: str | None, choice: tuple[str, ...] | None, regex: str | None) -> dict[str, Any] | None:
    """Returns structured_outputs for the given options; None if no option is given. Raises UsageError."""
    given = {"json": json_schema, "choice": choice and list(choice), "regex": regex}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise click.UsageError("give one of --json-schema, --choice and --regex")
    if json_schema is not None and not json_schema.lstrip().startswith("{"):
        try:
            given["json"] = Path(absolute(json_schema)).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise click.UsageError(
                f"--json-schema is {show(json_schema)}, which is no JSON object and no file that can be read: {reason}"
            ) from error
    return given or None


def adapters_of(loras: tuple[tuple[str, float], ...]) -> tuple[tuple[tuple[str, str], ...], dict[str, float] | None]:
    """Gives a name to each file of --lora. Returns pairs (name, path) for the engine, and a dictionary from the names
    to the scales, or None without files."""
    paths = tuple((f"lora-{i}", path) for i, (path, _) in enumerate(loras))
    return paths, {f"lora-{i}": scale for i, (_, scale) in enumerate(loras)} or None
