"""Packs the installed packages into wheels again, to make another environment without a package index."""

import base64
import hashlib
import zipfile
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_OF_THIS_INSTALLATION = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def needed_by(requirements: list[str], ours: frozenset[str]) -> list[Distribution]:
    """Returns the installed distributions that these requirements need, directly or indirectly, except `ours`."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(text) for text in requirements]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        known = distribution(name)
        if name not in ours:
            found[name] = known
        for text in known.requires or ():
            more = Requirement(text)
            extras = requirement.extras or {""}
            if more.marker is None or any(more.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(more)
    return list(found.values())


def repack(known: Distribution, folder: Path) -> Path:
    """Packs an installed distribution into an uncompressed wheel. Returns its path. Scripts are left out, because pip
    makes them from the entry points."""
    tags = [tag.split("-") for tag in Parser().parsestr(known.read_text("WHEEL") or "").get_all("Tag") or ()]
    tag = "-".join(".".join(sorted(set(parts))) for parts in zip(*tags, strict=True))
    name = canonicalize_name(known.metadata["Name"]).replace("-", "_")
    wheel = folder / f"{name}-{known.version}-{tag}.whl"
    record = []
    with zipfile.ZipFile(wheel, "w") as packed:
        for file in known.files or ():
            path = Path(str(known.locate_file(file)))
            if file.parts[0] == ".." or "__pycache__" in file.parts or not path.is_file():
                continue
            if file.parts[0].endswith(".dist-info"):
                info = file.parts[0]
                if file.name in _OF_THIS_INSTALLATION:
                    continue
            content = path.read_bytes()
            packed.writestr(str(file), content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f'"{file}",sha256={digest},{len(content)}')
        packed.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]) + "\n")
    return wheel
