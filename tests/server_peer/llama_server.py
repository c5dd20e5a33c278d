"""A program that llama.cpp's server tests start as llama-server. It replaces options of a hub by local files, and
starts a server.

LLAMABATCH_PEER names a JSON file with the command of the server, and the local files for names on the hub. The program
imports only the standard library, because it starts for each test.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence

WITH_VALUE = ("--hf-repo", "--hf-file", "--model-url", "--mmproj-url")
ALONE = ("--offline",)
MMPROJ = "/mmproj"


def translated(arguments: Sequence[str], models: Mapping[str, str], presets: str) -> list[str]:
    """Replaces arguments of a hub by `--model`, or by `--models-preset` for a router. Returns the new arguments.

    Args:
        models: "repository" or "repository/file" -> a local file. "" has the file for tests that name no model. A name
            that ends with MMPROJ has the file of the model's media encoder.
        presets: a file with the models of a router, for routers that have no presets of their own.

    Raises:
        KeyError: there is no local file for a name.
    """
    kept, asked = [], {}
    rest = iter(arguments)
    for argument in rest:
        if argument in WITH_VALUE:
            asked[argument] = next(rest)
        elif argument not in ALONE:
            kept.append(argument)
    if "--model" in kept or "-m" in kept:
        return kept
    if not asked:
        return kept if "--models-preset" in kept else ["--models-preset", presets, *kept]
    name = "/".join(asked[option] for option in ("--hf-repo", "--hf-file") if option in asked)
    encoder = models.get(name + MMPROJ) if "--no-mmproj" not in kept else None
    return ["--model", models[name], *(["--mmproj", encoder] if encoder else []), *kept]


def main() -> None:
    with open(os.environ["LLAMABATCH_PEER"], encoding="utf-8") as file:
        table = json.load(file)
    try:
        arguments = translated(sys.argv[1:], table["models"], table["presets"])
    except KeyError as name:
        sys.exit(f"No local file stands for the model {name}.")
    os.environ.update(table["environment"])
    os.execv(table["command"][0], [*table["command"], *arguments])


if __name__ == "__main__":
    main()
