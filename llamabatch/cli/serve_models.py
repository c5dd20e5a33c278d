"""Finds the models that `llamabatch serve` serves: on the command line, in a folder, and in a preset file.

A section of a preset file has the options of one model. Each key is either a flag of llamabatch or llama-server,
without its dashes, or a variable LLAMA_ARG_…. The section is parsed like a command line.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llamabatch.cli import echo_wrapped
from llamabatch.cli.config_file import parse_toml
from llamabatch.cli.flag_table import FALSE, TRUE
from llamabatch.cli.serve_flags import BY_NAME, ROWS, Translated, from_environment, translate
from llamabatch.errors import ConfigError, LlamaBatchError
from llamabatch.gguf.header import read_header
from llamabatch.utils.checks import nearest, show
from llamabatch.utils.paths import AUTO, TINY

_GLOBAL = "*"  # the section with the options of all models
_TOP = "llamabatch top"  # name of the section for the keys above all sections of an .ini file
_ON_STARTUP = "load-on-startup"
_OF_THE_ROUTER = ("version", "stop-timeout", "dedup-cache-models", _ON_STARTUP)  # preset keys that are not flags
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_LINE = re.compile(r"\[line\s+(\d+)\]")  # configparser's line number, one too high, because a line [_TOP] is added
_ABOUT_MMPROJ = frozenset(
    ("mmproj", "mm", "mmproj-url", "mmu", "mmproj-auto", "no-mmproj", "no-mmproj-auto", "LLAMA_ARG_MMPROJ")
)
_NO_MODEL = ("mmproj", "ggml-vocab")  # GGUF files whose names start with one of these are not models


@dataclass(frozen=True)
class NamedModel:
    """A model to serve, with its options.

    Attributes:
        path: the model, as for LLM; None: `options` name the model.
        options: keys and values of the model's section and of the common section in a preset file.
        on_startup: the model is loaded when the server starts.
        sleep_idle_s: seconds without a request after which the model is unloaded; None: the server's setting.
    """

    name: str
    path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    on_startup: bool = False
    sleep_idle_s: float | None = None


def named_models(models: Sequence[str], folder: Path | None, presets: Path | None) -> list[NamedModel] | None:
    """Returns the models: of the command line, then of the folder, then of the preset file.

    Returns None if the command line names one model without NAME=, and there is neither a folder nor a preset file.

    Args:
        models: values of --model.
        folder: value of --models-dir.
        presets: value of --models-preset.

    Raises:
        ConfigError: a folder or a file cannot be read; a name is given twice; there is no model.
    """
    pairs = [_pair(each) for each in models]
    if folder is None and presets is None:
        if len(pairs) == 1 and pairs[0][0] is None:
            return None
    elif list(models) == [TINY]:  # the default of --model, which the folder or the file replaces
        pairs = []
    found: dict[str, NamedModel] = {}
    for given, path in pairs:
        name = given or _stem(Path(path))
        if name in found:
            raise ConfigError(f"two models have the name {show(name)}; give one another name, as --model NAME=PATH")
        found[name] = NamedModel(name, path)
    if folder is not None:
        for each in _of_folder(folder):
            found.setdefault(each.name, each)
    common: Mapping[str, Any] = {}
    for name, section in (_sections(presets) if presets is not None else {}).items():
        if name == _GLOBAL:
            common = section
            continue
        on_startup = _switch(_ON_STARTUP, section.get(_ON_STARTUP, False))
        before = found.get(name, NamedModel(name))
        default = before.options if _ABOUT_MMPROJ.isdisjoint(section) else {}
        found[name] = replace(before, options={**default, **section}, on_startup=on_startup)
    if not found:
        raise ConfigError(f"there is no model in {presets or folder}; give a folder with files that end in .gguf")
    return [replace(each, options={**common, **each.options}) for each in found.values()]


def options_of(model: NamedModel, takes: Mapping[str, int], negatives: Iterable[str]) -> Translated:
    """Translates the options of a model's sections to our arguments.

    Args:
        takes: maps each of our flags to the number of its values.
        negatives: those of our flags that turn an option off.

    Raises:
        ConfigError: there is no such option, or its value is not allowed.
        click.UsageError: a flag of llama-server is refused.
    """
    known = {*takes, *negatives, *BY_NAME}
    variables = {name for row in ROWS for name in row.env.split()}
    line: list[str] = []
    environ: dict[str, str] = {}
    for key, value in model.options.items():
        if key in _OF_THE_ROUTER:
            continue
        if isinstance(value, Mapping):
            raise ConfigError(f"{key} of {show(model.name)} is a table; give a value")
        if key in variables:
            environ[key] = str(value)
            continue
        flag = next((each for each in (f"-{key}", f"--{key}") if each in known), None)
        if flag is None:
            advice = nearest(key, sorted(each.lstrip("-") for each in known if each.startswith("--")))
            raise ConfigError(f"the section {show(model.name)} has no option {show(key)}{advice}")
        if isinstance(value, list) and key in ("model", "m"):
            raise ConfigError(f"model of {show(model.name)} is a list; give one path")
        for each in value if isinstance(value, list) else [value]:
            line += _words(flag, str(each).lower() if isinstance(each, bool) else str(each), takes)
    found, more = translate(line, {**takes, **dict.fromkeys(negatives, 0)}), from_environment(environ)
    return Translated([*more.args, *found.args], [*more.notes, *found.notes], {**more.environ, **found.environ})


def _words(flag: str, value: str, takes: Mapping[str, int]) -> list[str]:
    """Returns a flag and its value as arguments of a command line. If `value` turns off a flag without values, returns
    the negative flag, or [] if there is none."""
    row = BY_NAME[flag][0] if flag in BY_NAME else None
    if row.takes if row is not None else takes.get(flag):
        return [flag, value]
    if _switch(flag.lstrip("-"), value):
        return [flag]
    opposite = row.negatives[0] if row is not None and row.negatives else f"--no-{flag.lstrip('-')}"
    return [opposite] if opposite in takes or (row is not None and row.negatives) else []


def _switch(name: str, value: object) -> bool:
    text = str(value).lower()
    if text not in TRUE and text not in FALSE:
        raise ConfigError(f"{name} is {show(value)}; give true or false")
    return text in TRUE


def _pair(value: str) -> tuple[str | None, str]:
    """Splits NAME=PATH. Does not split an existing path or an address, which may contain an equals sign."""
    name, equals, path = value.partition("=")
    if not equals or not name or not path or Path(value).exists() or "/" in name or ":" in name:
        return None, value
    return name, path


def _stem(path: Path) -> str:
    name = path.stem if path.suffix.lower() == ".gguf" else path.name
    return _PART.sub("", name) or path.name


def _of_folder(folder: Path) -> Iterator[NamedModel]:
    """Yields the models of a folder: its GGUF files, and the GGUF files of its subfolders. A model that is alone in a
    subfolder is named after the subfolder, and uses the mmproj file of the subfolder if there is one."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--models-dir {show(str(folder))} cannot be read: {error.strerror}") from error
    found: dict[str, str] = {}
    for entry in entries:
        try:
            inner = sorted(entry.iterdir()) if entry.is_dir() else []
        except OSError as error:
            echo_wrapped(f"{show(entry.name)} is left out: {error.strerror}")
            continue
        files = _first_files(inner if entry.is_dir() else [entry])
        has_mmproj = len(files) == 1 and any("mmproj" in each.name.lower() for each in inner)
        for file in files:
            name = entry.name if entry.is_dir() and len(files) == 1 else _stem(file)
            if name in found:
                raise ConfigError(
                    f"{show(str(file))} and {show(found[name])} have one name, {show(name)}; rename one of them"
                )
            found[name] = str(file)
            yield NamedModel(name, str(file), {"mmproj": AUTO} if has_mmproj else {})


def _first_files(files: Iterable[Path]) -> list[Path]:
    """Returns the files that are models. Of a model in several files, returns only the first file."""
    found = []
    for file in sorted(files):
        part = _PART.search(file.stem)
        is_later = part is not None and not part[0].startswith("-00001-")
        if (
            file.suffix.lower() == ".gguf"
            and not is_later
            and not file.name.startswith(_NO_MODEL)
            and not _is_aid(file)
        ):
            found.append(file)
    return found


def _is_aid(file: Path) -> bool:
    """Returns True if the header says that the file is not a model, but an adapter, an encoder of pictures or the
    like."""
    try:
        header = read_header(file)
    except (OSError, LlamaBatchError):
        return False  # the error is reported when the file is read as a model
    return header.metadata.get("general.type", "model") != "model" or header.architecture == "clip"


def _sections(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the sections of a preset file, TOML or llama-server's INI. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8"
        raise ConfigError(f"--models-preset {show(str(path))} cannot be read: {reason}") from error
    try:
        found = parse_toml(text) if path.suffix == ".toml" else _ini(text)
    except (ValueError, configparser.Error) as error:
        message = _LINE.sub(lambda match: f"line {int(match[1]) - 1}", " ".join(str(error).split()))
        raise ConfigError(f"--models-preset {show(str(path))}: {message}") from error
    for name, section in list(found.items()):
        if not isinstance(section, Mapping):
            if name not in _OF_THE_ROUTER:
                raise ConfigError(f"{path} has {show(name)} outside a section; give each model one, as [name]")
            del found[name]
        else:
            found[name] = {_as_flag(key): value for key, value in section.items()}
    return found


def _as_flag(key: str) -> str:
    """Replaces underscores of the key by hyphens, as in flags. Returns a variable LLAMA_ARG_… unchanged."""
    return key if key.startswith("LLAMA_ARG_") else key.replace("_", "-")


def _ini(text: str) -> dict[str, Any]:
    parser = configparser.ConfigParser(
        delimiters=("=",), comment_prefixes=("#", ";"), interpolation=None, default_section="\0"
    )
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string(f"[{_TOP}]\n{text}", "the file")
    found: dict[str, Any] = {name: dict(parser[name]) for name in parser.sections()}
    return {**found.pop(_TOP), **found}
