"""`llamabatch serve`: serves a model over HTTP, also with the flags of llama-server and of `vllm serve`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from llamabatch.cli import echo_wrapped
from llamabatch.cli.help_groups import GROUPS, SERVER_GROUPS, GroupedCommand
from llamabatch.cli.options import (
    MODEL_VARIABLE,
    chat_template_option,
    engine_options,
    lora_option,
    sampling_options,
    variable_of,
)
from llamabatch.cli.param_types import ModelName, Text
from llamabatch.cli.serve_flags import Translated, from_environment, translate
from llamabatch.cli.serve_models import NamedModel, named_models, options_of
from llamabatch.cli.serve_runs import OneOfSeveral, serve_one, serve_several
from llamabatch.config import MIN_CTX, EngineConfig
from llamabatch.errors import ConfigError
from llamabatch.gguf.resolve import local, resolve
from llamabatch.request.samplers import KNOWN, known_samplers
from llamabatch.server.options import LOG_LEVELS, ServerOptions
from llamabatch.utils.checks import nearest, show
from llamabatch.utils.paths import TINY

Command = Callable[..., Any]

_PREFIX = variable_of("")
_ELSEWHERE_VARIABLES = frozenset(
    _PREFIX + name
    for name in (
        "BREAKS",
        "CACHE",
        "CONFIG",
        "CPU_VARIANT",
        "LINE",
        "LLAMA",
        "NATIVE",
        "RPC",
        "SOURCE",
        "SOURCE_SHA256",
    )
)
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_[0-9]+_|$)")
_KEY_VARIABLES = (variable_of("api_key"), "LLAMA_API_KEY", "VLLM_API_KEY")
_FLAGS = {"api_keys": "--api-key", "allowed_hosts": "--allowed-host", "served_model_names": "--served-model-name"}
_FLAGS["threads"] = "--threads-http"  # --threads means the engine's threads, as in llama-server
_DEFAULTS = {"n_ctx": "fit", "isolate": "true"}
_DEFAULT = re.compile(r"\[default: [^\]]*\]")
_LINE, _MODEL = "llamabatch.line", "llamabatch.model"  # keys of click's Context.meta
# Server options that a preset file's section may set for its model. The other server options apply to all models.
_OF_A_MODEL = (
    *("served_model_names", "any_model", "strict", "max_logprobs", "enable_thinking", "trust_request_chat_template"),
    *("lora_dir", "slots", "props", "threads"),
)
_OF_THE_SERVER = {each.name for each in fields(ServerOptions)} - {*_OF_A_MODEL, "sampling", "chat_template"}
_OF_THE_SERVER |= {"models_dir", "models_preset", "models_max", "models_autoload", "models_fifo"}
# Fields of ServerOptions that get no generated option, because other options set them.
_ELSEWHERE = ("sampling", "chat_template", "chat_template_kwargs", "default_adapters")


def unknown_variables(environ: Mapping[str, str], known: Collection[str]) -> list[str]:
    """Returns a message for each variable LLAMABATCH_… that no option of `serve` reads. A misspelled variable could
    otherwise leave a server without its API key. Ignores variables that Kubernetes makes from names of services."""
    messages = []
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known and not _OF_KUBERNETES.search(name):
            other = name.replace(f"{_PREFIX}NO_", _PREFIX, 1)
            advice = f"; {other}=0 turns it off" if other in known and other != name else nearest(name, sorted(known))
            messages.append(f"the variable {name} has no effect{advice}")
    return messages


class ServeCommand(GroupedCommand):
    """A command that understands the flags and variables of llama-server and vLLM.

    The first source that sets an option wins: a flag, LLAMABATCH_…, LLAMA_ARG_…, the user's config file.
    """

    groups = {"Options": (), **SERVER_GROUPS, **GROUPS}  # noqa: RUF012  # as in the base class

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell asks for completions of an incomplete line
            return super().parse_args(ctx, args)
        ctx.meta.setdefault(_LINE, tuple(args))
        options, negatives, takes = _flags(self)
        given = translate(args, takes | dict.fromkeys(negatives, 0))
        named = (each.envvar for each in self.params if each.envvar)
        known = {name for one in named for name in ([one] if isinstance(one, str) else one)}
        is_first = _MODEL not in ctx.meta  # with several models, _of_one parses the line again for each model
        for message in unknown_variables(os.environ, known | _ELSEWHERE_VARIABLES) if is_first else ():
            echo_wrapped(message)
        theirs = from_environment(os.environ)
        known = {
            arg.partition("=")[0] for arg, before in zip(given.args[1:], given.args, strict=False) if before == "-P"
        }
        ctx.default_map = {**(ctx.default_map or {}), **_as_defaults(theirs, options, negatives)}
        if isinstance(model := ctx.default_map.get("model"), str):  # from the user's config file
            ctx.default_map["model"] = [model]
        if known and "others" in ctx.default_map:  # if the command line has -P, click ignores the defaults of -P
            more = [each for each in ctx.default_map["others"] if each.partition("=")[0] not in known]
            given.args = [*(arg for each in more for arg in ("-P", each)), *given.args]
        for name, value in {**theirs.environ, **given.environ}.items():
            os.environ.setdefault(name, value) if name in theirs.environ else os.environ.__setitem__(name, value)
        for note in (*theirs.notes, *given.notes) if is_first else ():
            echo_wrapped(note)
        return super().parse_args(ctx, given.args)


def _flags(command: click.Command) -> tuple[dict[str, click.Option], dict[str, click.Option], dict[str, int]]:
    """Returns three dictionaries of a command: the option of each flag, the option of each negative flag (--no-…), and
    the number of values of each flag."""
    options = [each for each in command.params if isinstance(each, click.Option)]
    positive = {flag: each for each in options for flag in each.opts}
    negative = {flag: each for each in options for flag in each.secondary_opts}
    return positive, negative, {flag: 0 if each.is_flag else each.nargs for flag, each in positive.items()}


def _as_defaults(
    theirs: Translated, options: Mapping[str, click.Option], negatives: Mapping[str, click.Option]
) -> dict[str, Any]:
    """Returns a dictionary from the names of parameters to the values in `theirs`. These come from llama-server's
    variables or from a section of a preset file."""
    found: dict[str, Any] = {}
    rest = list(theirs.args)
    while rest:
        flag = rest.pop(0)
        option = options.get(flag) or negatives[flag]
        name = str(option.name)
        if option.is_flag:
            found[name] = flag in options
        elif option.multiple:
            found.setdefault(name, []).append(rest.pop(0))
        else:
            found[name] = rest.pop(0)
    return found


def _server_options(command: Command) -> Command:
    """Adds an option for each field of ServerOptions, except fields that already have an option."""
    decorated = command
    for each in reversed(fields(ServerOptions)):
        if each.name in _ELSEWHERE:
            continue
        flag = _FLAGS.get(each.name, f"--{each.name.replace('_', '-')}")
        kind, help = str(each.type), each.metadata["help"]
        more: dict[str, Any] = {}
        if kind.startswith("bool") and not each.name.startswith("no_"):
            flag = f"{flag}/--no-{flag[2:]}"
        elif kind.startswith("bool"):
            more["is_flag"] = True
        elif kind.startswith("tuple"):
            more["multiple"] = True
        elif each.name == "log_level":
            more["type"] = Text(LOG_LEVELS)
        else:
            more["type"] = int if kind.startswith("int") else float if kind.startswith("float") else str
        if each.default not in (None, (), "", False):
            shown = ",".join(each.default) if isinstance(each.default, tuple) else each.default
            help = f"{help}  [default: {str(shown).lower() if isinstance(shown, bool) else shown}]"
        decorated = click.option(flag, each.name, default=None, help=help, **more)(decorated)
    return decorated


def _hidden(name: str, help: str, **more: Any) -> Callable[[Command], Command]:
    """Returns an option of llama-server. The help does not show it."""
    return click.option(name, hidden=True, help=help, **more)


@click.command(cls=ServeCommand)
@click.argument("model_tag", metavar="[MODEL]", required=False)
@click.option(
    "-m",
    "--model",
    default=(TINY,),
    multiple=True,
    type=ModelName(),
    envvar=MODEL_VARIABLE,
    show_default=True,
    help="Path of a .gguf file, 'tiny' for the bundled model, owner/repo:Q4_K_M on Hugging Face's hub, or the https "
    f"address of a file; not given: {MODEL_VARIABLE}. Several models: -m NAME=PATH for each; requests choose by NAME.",
)
@click.option(
    "--models-dir",
    type=click.Path(path_type=Path),
    help="Folder of models; each .gguf file in it is served by its name.",
)
@click.option(
    "--models-preset",
    type=click.Path(path_type=Path),
    help="File with a section of options for each model: TOML, or llama-server's INI.",
)
@click.option("--models-max", type=int, help="With several models: how many may be loaded at once (0: all that fit).")
@click.option(
    "--models-autoload/--no-models-autoload",
    default=None,
    help="With several models: a request loads its model; otherwise only POST /models/load does.  [default: true]",
)
@click.option(
    "--models-fifo", is_flag=True, help="With several models: answer strictly in order, which needs more loads."
)
@click.option(
    "--sleep-idle-seconds", type=float, help="Seconds without a request after which a model is unloaded until the next."
)
@_server_options
@chat_template_option
@click.option(
    "--chat-template-kwargs",
    "template_kwargs",
    multiple=True,
    help="Values for the chat template, as JSON: '{\"enable_thinking\": false}'; may be given several times.",
)
@lora_option
@click.option(
    "--lora-module",
    "modules",
    multiple=True,
    metavar="NAME=FILE",
    help="An adapter that requests name as their model; may be given several times.",
)
@_hidden("--ctx-size", "llama-server's: tokens of all slots together.", type=int)
@_hidden("--n-predict", "llama-server's: tokens to generate at most; -1: any number.", type=int)
@_hidden("--samplers", "llama-server's: names of samplers in their order.")
@_hidden("--sampler-seq", "llama-server's: letters of samplers in their order.")
@_hidden("--lora-init-without-apply", "llama-server's: adapters have scale 0 at first.", is_flag=True)
@_hidden("--hf-repo", "llama-server's: owner/repo:quant.")
@_hidden("--hf-file", "llama-server's: file in the repository.")
@(lambda command: sampling_options(command, short=False))
@engine_options()
def serve(
    model_tag: str | None, model: tuple[str, ...], models_dir: Path | None, models_preset: Path | None,
    models_max: int | None, models_autoload: bool | None, models_fifo: bool, sleep_idle_seconds: float | None,
    **given: Any,
) -> Any:  # fmt: skip
    """Serve a model over HTTP, or several: OpenAI's endpoints, llama-server's and vLLM's. Needs llamabatch[server].

    The flags of llama-server and of `vllm serve` are understood, and LLAMA_ARG_… in the environment;
    docs/serve_flags.md lists them. Each option here has a variable LLAMABATCH_…, too: LLAMABATCH_PORT. The options of
    Sampling are defaults for requests that do not set them.

    Exit code 1 if the engine does not fit in memory; the memory it needs is shown before anything is loaded.
    """
    context = click.get_current_context()
    if _MODEL in context.meta:  # _of_one has invoked this command only to read the options of one model
        return _read(context.meta[_MODEL], **given)
    tagged = _tagged(model_tag, model, given["hf_repo"], given["hf_file"])
    named = named_models(tagged, models_dir, models_preset)
    if named is None and (models_max is not None or models_autoload is not None or models_fifo):
        echo_wrapped("--models-max, --models-autoload and --models-fifo have no effect on a single model")
    if named is None and sleep_idle_seconds is None:
        serve_one(*_read(NamedModel("", tagged[0]), **given))
        return None
    wanted: dict[str, Any] = {"max_loaded": models_max, "autoload": models_autoload, "sleep_idle_s": sleep_idle_seconds}
    pool = {name: value for name, value in wanted.items() if value is not None} | {"in_order": models_fifo}
    _, options = _read(NamedModel("", TINY), **{**given, "ctx_size": None})
    if named is None:
        serve_several([NamedModel("", tagged[0], on_startup=True)], _of_one, options, pool)
        return None
    can_change = models_dir is not None or models_preset is not None
    look_again = (lambda: named_models(tagged, models_dir, models_preset) or []) if can_change else None
    serve_several(named, _of_one, options, pool, look_again)
    return None


def _read(
    model: NamedModel, *, chat_template: str | None, template_kwargs: tuple[str, ...],
    loras: tuple[tuple[str, float], ...], modules: tuple[str, ...], ctx_size: int | None, n_predict: int | None,
    samplers: str | None, sampler_seq: str | None, lora_init_without_apply: bool, hf_repo: str | None,
    hf_file: str | None, engine: dict[str, Any], sampling: dict[str, Any], **server: Any,
) -> tuple[EngineConfig, ServerOptions]:  # fmt: skip
    """Returns the engine options and the server options for a model."""
    from llamabatch.server.application import engine_config  # imported late: needs the extra `server`

    path = local(_on_hub(hf_repo, hf_file)) if model.path is None and hf_repo is not None else model.path
    assert path is not None
    if n_predict is not None and "max_tokens" not in sampling:
        sampling["max_tokens"] = None if n_predict < 0 else n_predict
    sampling |= _samplers(samplers, sampler_seq)
    given: dict[str, Any] = {
        name: ",".join(value) if isinstance(value, tuple) else value for name, value in server.items()
    }
    names = tuple(name for each in server["served_model_names"] for name in each.split(",") if name)
    engine["adapters"], scales = _adapters(loras, modules, lora_init_without_apply)
    given = {name: value for name, value in given.items() if value is not None and value != ""}
    if model.name:
        given["served_model_names"] = tuple(dict.fromkeys((model.name, *names)))
    options = ServerOptions(
        **given,
        sampling=sampling,
        chat_template=chat_template,
        chat_template_kwargs=_merged(template_kwargs),
        default_adapters=scales,
    )
    options.check_exposure()
    if ctx_size is not None and "n_ctx" not in engine:
        engine |= _context(ctx_size, engine, path)
    return engine_config(path, engine), options


def _of_one(model: NamedModel) -> OneOfSeveral:
    """Returns the engine and server options of one of several models. The command line overrides the model's
    section."""
    context = click.get_current_context()
    command = context.command
    positive, negative, takes = _flags(command)
    theirs = options_of(model, takes, negative)
    defaults = _as_defaults(theirs, positive, negative)
    path = defaults.pop("model", [model.path])[-1]
    if path is None and "hf_repo" not in defaults:
        raise ConfigError(f"the section {show(model.name)} names no model; give it a line model = PATH")
    idle_s = defaults.pop("sleep_idle_seconds", None)
    for name in (*defaults, *theirs.environ):
        if name in _OF_THE_SERVER or name in theirs.environ:
            flag = next((each for each in positive if positive[each].name == name), name)
            raise ConfigError(
                f"{flag} in the section {show(model.name)} is an option of the whole server; give it on the command "
                "line"
            )
    try:
        wanted = replace(model, path=path if path is None else local(path), sleep_idle_s=_number(idle_s))
        context.meta[_MODEL] = wanted
        for note in theirs.notes:
            echo_wrapped(note)
        inner = command.make_context(
            "serve", list(context.meta[_LINE]), context.parent, default_map={**(context.default_map or {}), **defaults}
        )
        with inner:
            found: tuple[EngineConfig, ServerOptions] = command.invoke(inner)
        return wanted, *found
    except click.UsageError as error:
        if not model.options:
            raise
        raise ConfigError(f"the section {show(model.name)}: {error.format_message()}") from error
    finally:
        context.meta.pop(_MODEL, None)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise ConfigError(f"sleep_idle_seconds is {show(text)}; give a number") from None


def _tagged(tag: str | None, models: tuple[str, ...], repo: str | None, file: str | None) -> list[str]:
    """Returns the positional model, else the model of -hf and -hff, else the models of -m."""
    if repo is not None and tag is None:
        tag = _on_hub(repo, file)
    if tag is None:
        return [each if "=" in each else local(each) for each in models]
    if any(each not in (tag, TINY, local(tag)) for each in models):
        raise click.UsageError(f"two models are given, {show(tag)} and {show(models[0])}; give one")
    return [local(tag)]


def _on_hub(repo: str, file: str | None) -> str:
    name = f"{repo.removeprefix('hf:').partition(':')[0]}:{file}" if file else repo.removeprefix("hf:")
    return f"hf:{name}"


def _context(total: int, engine: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Returns the engine options that correspond to llama-server's --ctx-size.

    Args:
        total: tokens of all slots together; 0: each slot gets the trained context length.
    """
    from llamabatch.engine.resolve_config import read_facts

    changed = EngineConfig(model, kv_overrides=engine.get("kv_overrides", ()))
    trained = read_facts(changed, resolve(model)).n_ctx_train
    slots, kv = engine.get("n_slots"), engine.get("kv", "auto")
    if total < 0:
        raise click.UsageError(
            f"--ctx-size is {total}; give 0 for the length that the model was trained for, or a larger number"
        )
    if total == 0:
        return {"n_ctx": trained}
    each = total // slots if isinstance(slots, int) and kv != "unified" else total
    if each < MIN_CTX:
        raise click.UsageError(f"--ctx-size {total} leaves {each} tokens to each slot; at least {MIN_CTX} are needed")
    cells = {"kv_cells": total} if kv == "unified" and "kv_cells" not in engine else {}
    if each > trained:
        echo_wrapped(
            f"--ctx-size gives each slot {each:,} tokens, but the model was trained for {trained:,}: each slot gets "
            f"{trained:,}"
        )
    return {"n_ctx": min(each, trained), **cells}


def _samplers(names: str | None, letters: str | None) -> dict[str, Any]:
    """Returns the field `samplers` for --samplers or --sampler-seq; {} if neither is given."""
    if names is None and letters is None:
        return {}
    chain = [name.strip() for name in names.split(";") if name.strip()] if names is not None else list(letters or "")
    found, unknown = known_samplers(chain)
    for name in unknown:
        echo_wrapped(f"{show(name)} of --samplers has no effect: known are {', '.join(KNOWN)}")
    return {"samplers": tuple(found)}


def _adapters(
    loras: tuple[tuple[str, float], ...], modules: tuple[str, ...], without_apply: bool
) -> tuple[tuple[tuple[str, str], ...], dict[str, float]]:
    """Returns names and paths of adapters for the engine, and the scales of the --lora adapters for all requests.
    Raises UsageError."""
    paths: dict[str, str] = {}
    scales: dict[str, float] = {}
    for path, scale in loras:
        name, n = Path(path).stem, 1
        while name in paths:
            n += 1
            name = f"{Path(path).stem}-{n}"
        paths[name] = path
        scales[name] = 0.0 if without_apply else scale
    for module in modules:
        name, equals, path = module.partition("=")
        if not equals or not name or not path or name in paths:
            raise click.UsageError(f"--lora-module {show(module)}: give NAME=FILE, each name once")
        paths[name] = path
    return tuple(paths.items()), scales


def _merged(objects: tuple[str, ...]) -> dict[str, Any]:
    """Merges JSON objects; a later object overrides earlier ones. Raises ConfigError."""
    found: dict[str, Any] = {}
    for text in objects:
        try:
            found |= json.loads(text)
        except (ValueError, TypeError):
            raise ConfigError(f"chat_template_kwargs is {show(text)}; give a JSON object") from None
    return found


for _each in serve.params:
    if isinstance(_each, click.Option) and not _each.hidden and _each.envvar is None and _each.name != "help":
        _each.envvar = _KEY_VARIABLES if _each.name == "api_keys" else variable_of(str(_each.name))
    if isinstance(_each, click.Option) and _each.name in _DEFAULTS:  # shows the server's default, not LLM's
        _each.help = _DEFAULT.sub(f"[default: {_DEFAULTS[str(_each.name)]}]", str(_each.help))
