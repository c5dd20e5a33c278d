"""Makes the project's page on an index: README.md with links that work outside of the repository, and addresses.

The hook also sets the dependencies. With LLAMABATCH_RELEASE in the environment, which `make wheels` sets, llamabatch
needs llamabatch-llama on systems that have a wheel of it, and llama-cpp-python on others. In a checkout and in the
source package it needs llama-cpp-python.

If `address` in `[tool.hatch.metadata.hooks.custom]` of pyproject.toml names the repository, relative links lead to the
files of this version in the repository. If it is empty, links become plain text with the file's path, and pictures
become their descriptions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)")
_OUTSIDE = re.compile(r"(?:[a-z][a-z0-9+.-]*:|#|//)", re.IGNORECASE)
RELEASE = "LLAMABATCH_RELEASE"
_PLACEHOLDER = "<this repository>"  # in README.md's `git clone`


class CustomMetadataHook(MetadataHookInterface):
    """Sets the fields `readme`, `urls` and `dependencies`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        version, address = str(metadata["version"]), str(self.config["address"]).rstrip("/")
        files, pictures = str(self.config["files"]), str(self.config["pictures"])
        metadata["readme"] = {"content-type": "text/markdown", "text": page(text, address, version, files, pictures)}
        metadata["urls"] = urls(address, version, files)
        llama = llama_cpp(
            version, str(self.config["source"]), str(self.config["wheels"]), bool(os.environ.get(RELEASE))
        )
        metadata["dependencies"] = [*llama, *self.config["dependencies"]]


def llama_cpp(version: str, source: str, wheels: str, is_release: bool) -> list[str]:
    """Returns the dependencies that provide llama.cpp.

    Args:
        source: the requirement of llama-cpp-python, which is compiled when it is installed.
        wheels: the environment marker of the systems that have a wheel of llamabatch-llama.
    """
    if not is_release:
        return [source]
    others = " or ".join(f"({part})" for part in _negated(wheels))
    return [f"llamabatch-llama=={version}; {wheels}", f"{source}; {others}"]


def _negated(marker: str) -> list[str]:
    """Returns markers. At least one is true wherever `marker` is false. `marker` has clauses joined by `and`."""
    alternatives = []
    for clause in marker.split(" and "):
        opposite = clause.replace("==", "!=").replace(" or ", " and ")
        alternatives.append(opposite.strip().removeprefix("(").removesuffix(")"))
    return alternatives


def page(text: str, address: str, version: str, files: str, pictures: str) -> str:
    """Returns a page in Markdown for readers who do not have the repository.

    Args:
        address: address of the repository; "" if it has none.
        files, pictures: patterns of the addresses of a file and of a picture, with {address}, {version} and {path}.
    """

    def changed(found: re.Match[str]) -> str:
        is_picture, words, target = bool(found[1]), found[2], found[3]
        if _OUTSIDE.match(target):
            return found[0]
        if address:
            pattern = pictures if is_picture else files
            return f"{found[1]}[{words}]({pattern.format(address=address, version=version, path=target)})"
        if is_picture:
            return f"*{words}*"
        path = target.split("#")[0]
        return words if words == path else f"{words}: `{path}`"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)  # code stays as it is
    parts[::2] = [_LINK.sub(changed, part) for part in parts[::2]]
    return "".join(parts).replace(_PLACEHOLDER, address or _PLACEHOLDER)


def urls(address: str, version: str, files: str) -> dict[str, str]:
    """Returns the project's addresses by their names on an index; empty if the repository has no address."""
    if not address:
        return {}
    return {"Repository": address} | {
        name: files.format(address=address, version=version, path=path)
        for name, path in (("Documentation", "docs/index.md"), ("Changelog", "CHANGELOG.md"))
    }
