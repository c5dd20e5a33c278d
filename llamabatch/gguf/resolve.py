"""Finds the file for a model's name: a path, "tiny" (the bundled model), an https address, or "owner/repo:Q4_K_M".

The last form is a model on Hugging Face's hub, read through huggingface_hub with its cache, tokens and offline mode.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from llamabatch.errors import ModelFileError, SetupError
from llamabatch.gguf.header import check_start, part_names, part_paths
from llamabatch.utils.checks import reason, show
from llamabatch.utils.network import PROBE_S, reachable
from llamabatch.utils.paths import HUB, TINY, absolute, is_remote, model_name, one_line

Pick = Callable[[Iterable[str], str | None, str], str]
_REFERENCE = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([^:]+))?(?::(.+))?")
_MOST_SHOWN = 20
_MOST_NAMED = 5  # a message names at most this many models of a folder
_MOST_ENTRIES = 10_000  # at most this many entries of a folder are searched for models
_LONGEST = 200  # a longer name of a missing file is cut before it is compared with other names
_SAMPLES = 64  # samples of a file for model_identity, each with _SAMPLE_BYTES bytes
_SAMPLE_BYTES = 65536


def resolve(model: str) -> Path:
    """Returns the absolute path of a model's file, or of its first part.

    Args:
        model: a path, "tiny", the https address of a .gguf file, or "hf:owner/repo:Q4_K_M". The prefix "hf:" may be
            left out if no file has this name.

    Raises:
        ConfigError: the path is relative, and the working directory is gone.
        ModelFileError: the file or a part of it is missing, cannot be read, or is not a GGUF file.
        SetupError: the model is on the hub, and huggingface_hub is not installed.
    """
    model = model_name(model)
    if model == TINY:
        path = Path(str(resources.files("llamabatch.bundled") / "tiny.gguf"))
    elif model.startswith(HUB):
        path = fetch_reference(model)
    elif is_remote(model):
        from llamabatch.gguf.download import download  # imported late, because it imports urllib and ssl

        path = download(model)
    else:
        path = Path(absolute(model))
    try:
        parts = part_paths(path)
        if path != parts[0] and path.exists():
            raise ModelFileError(
                f"{one_line(path)} is one of {len(parts)} parts of a model; give the first, {parts[0].name}"
            )
        for part in parts:
            if part != path and path.exists() and not part.exists():
                raise ModelFileError(f"{part} is missing: {path.name} is the first of {len(parts)} parts of a model")
            _check(part)
    except (OSError, ValueError) as error:  # for example: the name is too long or has a NUL, or access is denied
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{model} cannot be read: {reason(error)}") from error
    return path


def local(model: str) -> str:
    """Returns the path of the local file of a remote model; other models are returned unchanged. Raises as resolve."""
    return str(resolve(model)) if is_remote(model_name(model)) else model


def file_bytes(path: Path) -> int:
    """Returns the bytes of a model's file, or of all its parts. Raises OSError."""
    return sum(part.stat().st_size for part in part_paths(path))


def _check(path: Path) -> None:
    """Raises ModelFileError unless the path is a regular file that begins like a GGUF file."""
    if path.is_dir():
        files = sorted(gguf_files(path))
        there = (
            f" with {', '.join(map(show, files[:_MOST_NAMED]))}{', …' * (len(files) > _MOST_NAMED)}" if files else ""
        )
        raise ModelFileError(f"{one_line(path)} is a directory{there}; give the path of a .gguf file, or 'tiny'")
    if not path.exists():
        raise ModelFileError(f"{one_line(path)} does not exist{_meant(path)}")
    if not path.is_file():
        raise ModelFileError(f"{one_line(path)} is no regular file; give the path of a .gguf file, or 'tiny'")
    check_start(path)


def _meant(path: Path) -> str:
    """Returns the end of a message about a missing file: a similar file or model, or general advice."""
    usual = "; give the path of a .gguf file, or 'tiny' for the bundled model"
    if not path.parent.is_dir():
        return f" ({one_line(path.parent)} is no folder){usual}"
    by_name = {name.lower().removesuffix(".gguf"): name for name in gguf_files(path.parent)}
    close = difflib.get_close_matches(path.name.lower().removesuffix(".gguf")[:_LONGEST], [*by_name, TINY], n=1)
    return f"; did you mean {show(by_name.get(close[0], TINY))}?" if close else usual


def gguf_files(folder: Path) -> list[str]:
    """Returns the names of the .gguf files among the first 10,000 entries of a folder."""
    with os.scandir(folder) as entries:
        return [each.name for each in itertools.islice(entries, _MOST_ENTRIES) if each.name.endswith(".gguf")]


def fetch_reference(
    reference: str, revision: str | None = None, cache_dir: str | Path | None = None, *, pick: Pick | None = None
) -> Path:
    """Returns the file of "hf:owner/repo:Q4_K_M" or "hf:owner/repo@revision:*pattern*.gguf". Raises as fetch.

    Args:
        revision: used if the reference names no revision.
        cache_dir, pick: as for fetch.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise ModelFileError(f"{show(reference)} is no name on the hub; give {HUB}owner/repo:Q4_K_M")
    repo_id, named, pattern = match.groups()
    return fetch(repo_id, pattern, revision=named or revision, cache_dir=cache_dir, pick=pick)


def fetch(
    repo_id: str,
    filename: str | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    pick: Pick | None = None,
) -> Path:
    """Downloads a model with all its parts, unless it is in the cache. Returns its file, or its first part.

    Args:
        repo_id: "owner/repo".
        filename: a pattern such as "*Q4_K_M.gguf", or a quantisation such as "Q4_K_M"; None: the only model.
        revision: branch, tag or commit; None for main.
        cache_dir: folder of the cache; None for huggingface_hub's own folder.
        local_files_only: use only the cache, as with HF_HUB_OFFLINE=1.
        pick: chooses a file of the repository by `filename`; None for `choose`.

    Raises:
        ModelFileError: the repository does not exist, no model of it matches, or several match; the message lists them.
        SetupError: huggingface_hub is not installed.
    """
    hub = _huggingface_hub(repo_id)
    for name, text in (("repo_id", repo_id), ("filename", filename), ("revision", revision)):
        if not isinstance(text, str) and (text is not None or name == "repo_id"):
            raise ModelFileError(f"{name} is {show(text)}; give a text")
    if cache_dir is not None:
        cache_dir = absolute(cache_dir)
    names = None
    if not (local_files_only or hub.constants.HF_HUB_OFFLINE):
        names = _names_online(hub, repo_id, revision) if _reachable(hub) else None
    if names is None:
        return _from_cache(hub, repo_id, filename, revision, cache_dir, pick or choose)
    first, *others = part_names((pick or choose)(names, filename, repo_id))
    paths = [_download(hub, repo_id, name, revision, cache_dir) for name in (first, *others)]
    return paths[0]


def _huggingface_hub(repo_id: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise SetupError(
            f"{show(repo_id)} is no file here, and models from the hub need huggingface_hub: "
            'pip install "llamabatch[hub]"'
        ) from error
    return huggingface_hub


def _reachable(hub: Any) -> bool:
    """Returns True if the hub can be reached within HF_HUB_ETAG_TIMEOUT seconds, or PROBE_S by default. huggingface_hub
    itself would try for 24 s."""
    given = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return reachable(hub.constants.ENDPOINT, float(given) if given.isdigit() else PROBE_S)


def _names_online(hub: Any, repo_id: str, revision: str | None) -> list[str] | None:
    """Returns the files of a repository, or None if the hub cannot be reached."""
    try:
        return list(hub.HfApi().list_repo_files(repo_id, revision=revision))
    except (hub.errors.HfHubHTTPError, hub.errors.HFValidationError) as error:  # the hub has answered with an error
        raise ModelFileError(f"{repo_id} cannot be read: {_first_line(error)}") from error
    except Exception:  # no connection; the type of the exception depends on huggingface_hub's release
        return None


def _download(hub: Any, repo_id: str, name: str, revision: str | None, cache_dir: str | Path | None) -> Path:
    try:
        return Path(hub.hf_hub_download(repo_id, name, revision=revision, cache_dir=cache_dir))
    except Exception as error:  # for example no network, a full disk, or a missing part
        raise ModelFileError(f"{name} of {repo_id} cannot be fetched: {_first_line(error)}") from error


def _from_cache(
    hub: Any, repo_id: str, filename: str | None, revision: str | None, cache_dir: str | Path | None, pick: Pick
) -> Path:
    where = f"the cache of {repo_id}"
    folder = _snapshot(hub, repo_id, revision or "main", cache_dir)
    if folder is None:
        raise ModelFileError(
            f"{repo_id} cannot be fetched: the hub is out of reach or turned off, and there is nothing of "
            f"{revision or 'main'} in the cache; no file here has this name either"
        )
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    parts = part_names(pick(names, filename, where))
    for name in parts:
        if name not in names:
            raise ModelFileError(f"{where} lacks {name}; fetch it while the hub can be reached")
    return folder / parts[0]


def _snapshot(hub: Any, repo_id: str, revision: str, cache_dir: str | Path | None) -> Path | None:
    try:
        found = hub.scan_cache_dir(cache_dir or hub.constants.HF_HUB_CACHE)
    except hub.errors.CacheNotFound:
        return None
    for repo in found.repos:
        if repo.repo_type == "model" and repo.repo_id == repo_id:
            for known in repo.revisions:
                if revision in known.refs or known.commit_hash.startswith(revision):
                    return Path(known.snapshot_path)
    return None


def choose(names: Iterable[str], wanted: str | None, where: str) -> str:
    """Returns the file, or the first part, of the only model that matches `wanted`. Raises ModelFileError."""
    files = [name for name in names if name.lower().endswith(".gguf")]
    chosen = sorted({part_names(name)[0] for name in files if _matches(name, wanted)})
    if len(chosen) == 1:
        return chosen[0]
    condition = f"matches {wanted!r}" if wanted else "is a model"
    if chosen:
        raise ModelFileError(f"more than one file of {where} {condition}: {_listed(chosen)}; say which")
    models = sorted({part_names(name)[0] for name in files})
    raise ModelFileError(f"no file of {where} {condition}; there is {_listed(models) or 'no .gguf file at all'}")


def _matches(name: str, wanted: str | None) -> bool:
    name = name.lower()
    if wanted is None:
        return "mmproj" not in name  # an mmproj file contains an encoder, not a model
    wanted = wanted.lower()
    if wanted.endswith(".gguf") or any(sign in wanted for sign in "*?["):
        return fnmatchcase(name, wanted) or fnmatchcase(name.rsplit("/", 1)[-1], wanted)
    # The quantisation must match as a whole word: Q4_K is neither IQ4_K nor Q4_K_M.
    return "mmproj" not in name and re.search(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9_])", name) is not None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def model_identity(model: Path) -> dict[str, Any]:
    """Returns facts that identify a model's file in any folder. Raises OSError.

    "name" is the file's name without folders, and "size" the bytes of all parts. "sha256" is the hash of samples: 64
    from each part, each of 64 KiB, evenly spaced, including the first and the last bytes. Two models of one shape have
    the same size, so size is not enough.
    """
    digest = hashlib.sha256()
    for part in (model.with_name(name) for name in part_names(model.name)):
        with part.open("rb") as file:
            last = max(0, part.stat().st_size - _SAMPLE_BYTES)
            for offset in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return {"name": model.name, "size": file_bytes(model), "sha256": digest.hexdigest()}
