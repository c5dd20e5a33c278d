"""The models of `llamabatch serve` where it serves several: from the command line, a folder, or a file of presets.

The options of a model are the same as on the command line, so that a section of a preset file is read as one: each key
is a flag without its dashes, of ours or of llama-server, or a variable LLAMA_ARG_….
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llamabatch.cli.config_file import parse_toml
from llamabatch.cli.flag_table import FALSE, TRUE
from llamabatch.cli.serve_flags import BY_NAME, Translated, from_environment, translate
from llamabatch.errors import ConfigError
from llamabatch.utils.checks import nearest, show
from llamabatch.utils.paths import TINY

_GLOBAL = "*"  # the section whose options all models have
_TOP = "llamabatch top"  # for keys of an .ini file before its first section
_VARIABLE = "LLAMA_ARG_"
_ON_STARTUP = "load-on-startup"
_OF_THE_ROUTER = ("version", "stop-timeout", "dedup-cache-models", _ON_STARTUP)  # llama-server's own
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_NO_MODEL = ("mmproj", "ggml-vocab")  # first letters of other GGUF files


@dataclass(frozen=True)
class NamedModel:
    """A model of several.

    Attributes:
        path: as for LLM; None: one of `options` says it.
        options: keys and values of sections.
        on_startup: it is loaded when the server starts.
    """

    name: str
    path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    on_startup: bool = False


def named_models(models: Sequence[str], folder: Path | None, presets: Path | None) -> list[NamedModel] | None:
    """The models in the order in which they were named; None: the command line has one, without a name of its own.

    Args:
        models: values of --model. folder: of --models-dir. presets: of --models-preset.

    Raises:
        ConfigError: a folder or a file cannot be read; a name is given twice; there is no model.
    """
    pairs = [_pair(each) for each in models]
    if folder is None and presets is None:
        if len(pairs) == 1 and pairs[0][0] is None:
            return None
    elif list(models) == [TINY]:  # the default
        pairs = []
    found: dict[str, NamedModel] = {}
    for given, path in pairs:
        name = given or _stem(Path(path))
        if name in found:
            raise ConfigError(f"two models have the name {show(name)}; give one another name, as --model NAME=PATH")
        found[name] = NamedModel(name, path)
    if folder is not None:
        for name, path in _of_folder(folder).items():
            found.setdefault(name, NamedModel(name, path))
    common: Mapping[str, Any] = {}
    for name, section in (_sections(presets) if presets is not None else {}).items():
        if name == _GLOBAL:
            common = section
            continue
        on_startup = str(section.get(_ON_STARTUP, False)).lower() in TRUE
        found[name] = replace(found.get(name, NamedModel(name)), options=section, on_startup=on_startup)
    if not found:
        raise ConfigError(f"there is no model in {presets or folder}; give a folder with files that end in .gguf")
    return [replace(each, options={**common, **each.options}) for each in found.values()]


def options_of(model: NamedModel, takes: Mapping[str, int], negatives: Iterable[str]) -> Translated:
    """The options of a model's sections as arguments of ours.

    Args:
        takes: flags of ours, and the number of values of each. negatives: flags of ours that turn something off.

    Raises:
        ConfigError: there is no such option. click.UsageError: one of llama-server's is refused.
    """
    known = {*takes, *negatives, *BY_NAME}
    line: list[str] = []
    environ: dict[str, str] = {}
    for key, value in model.options.items():
        if key in _OF_THE_ROUTER:
            continue
        if isinstance(value, Mapping):
            raise ConfigError(f"{key} of {show(model.name)} is a table; give a value")
        if key.startswith(_VARIABLE):
            environ[key] = str(value)
            continue
        name = key.replace("_", "-")
        flag = next((each for each in (f"-{name}", f"--{name}") if each in known), None)
        if flag is None:
            advice = nearest(name, sorted(each.lstrip("-") for each in known if each.startswith("--")))
            raise ConfigError(f"the section {show(model.name)} has no option {show(key)}{advice}")
        for each in value if isinstance(value, list) else [value]:
            line += _words(flag, str(each).lower() if isinstance(each, bool) else str(each), takes)
    found, more = translate(line, {**takes, **dict.fromkeys(negatives, 0)}), from_environment(environ)
    return Translated([*more.args, *found.args], [*more.notes, *found.notes], {**more.environ, **found.environ})


def _words(flag: str, value: str, takes: Mapping[str, int]) -> list[str]:
    """The words of a flag; a switch that is off is its opposite, or not there."""
    row = BY_NAME[flag][0] if flag in BY_NAME else None
    if row.takes if row is not None else takes.get(flag):
        return [flag, value]
    if value.lower() in TRUE:
        return [flag]
    if value.lower() not in FALSE:
        raise ConfigError(f"{flag.lstrip('-')} is {show(value)}; give true or false")
    opposite = row.negatives[0] if row is not None and row.negatives else f"--no-{flag.lstrip('-')}"
    return [opposite] if opposite in takes or (row is not None and row.negatives) else []


def _pair(value: str) -> tuple[str | None, str]:
    """NAME=PATH as two; a path that is there, and an address, may have a sign of equality of its own."""
    name, equals, path = value.partition("=")
    if not equals or not name or not path or Path(value).exists() or "/" in name or ":" in name:
        return None, value
    return name, path


def _stem(path: Path) -> str:
    name = path.name.removesuffix(".gguf")
    return _PART.sub("", name) or path.name


def _of_folder(folder: Path) -> dict[str, str]:
    """Models of a folder by name: its GGUF files, and the folders in it that hold the files of one."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"models_dir {show(str(folder))} cannot be read: {error.strerror}") from error
    found: dict[str, str] = {}
    for entry in entries:
        if entry.is_dir():
            files = _first_files(entry.glob("*.gguf"))
            if len(files) == 1:
                found[entry.name] = str(files[0])
            found |= {_stem(file): str(file) for file in files if len(files) > 1}
        else:
            found |= {_stem(file): str(file) for file in _first_files([entry])}
    return found


def _first_files(files: Iterable[Path]) -> list[Path]:
    """Those that are models, of several parts of one the first."""
    found = []
    for file in sorted(files):
        part = _PART.search(file.name.removesuffix(".gguf"))
        if file.suffix != ".gguf" or file.name.startswith(_NO_MODEL) or (part and not part[0].startswith("-00001-")):
            continue
        found.append(file)
    return found


def _sections(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a preset file, TOML or, as llama-server's, INI. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8"
        raise ConfigError(f"models_preset {show(str(path))} cannot be read: {reason}") from error
    try:
        found = parse_toml(text) if path.suffix == ".toml" else _ini(text)
    except (ValueError, configparser.Error) as error:
        raise ConfigError(f"models_preset {show(str(path))}: {' '.join(str(error).split())}") from error
    for name, section in list(found.items()):
        if not isinstance(section, Mapping):
            if name not in _OF_THE_ROUTER:
                raise ConfigError(f"{path} has {show(name)} outside a section; give each model one, as [name]")
            del found[name]
    return found


def _ini(text: str) -> dict[str, Any]:
    parser = configparser.ConfigParser(
        delimiters=("=",), comment_prefixes=("#", ";"), interpolation=None, default_section="\0"
    )
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string(f"[{_TOP}]\n{text}")
    found: dict[str, Any] = {name: dict(parser[name]) for name in parser.sections()}
    return {**found.pop(_TOP), **found}
