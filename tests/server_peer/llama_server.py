"""Stands between llama.cpp's server tests and a server: drops options that fetch from a hub, passes a local model.

The tests start it under the name llama-server. Its table is the JSON file that LLAMABATCH_PEER names: the command of
the server, and local files for the names on the hub. Standard library only, since it starts once a test.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence

WITH_VALUE = ("--hf-repo", "--hf-file", "--model-url", "--mmproj-url")
ALONE = ("--offline",)


def translated(arguments: Sequence[str], models: Mapping[str, str], presets: str) -> list[str]:
    """The arguments without those of a hub, with `--model` in their place, or `--models-preset` for a router.

    Args:
        models: "repository", or "repository/file", to a local file; "" is that of a test that names no model.
        presets: a file of the models of a router that has no presets of its own.

    Raises:
        KeyError: no local file stands for a name.
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
    return ["--model", models[name], *kept]


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
