"""The manifests of deploy/kubernetes as kustomize makes them, as far as they use it: resources, images, patches."""

import copy
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
FOLDERS = sorted(path.parent.name for path in (DEPLOY / "kubernetes").glob("*/kustomization.yaml"))


def documents(file):
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


def rendered(name):
    """The objects of a folder by their kind."""
    folder = DEPLOY / "kubernetes" / name
    [kustomization] = documents(folder / "kustomization.yaml")
    found = {each["kind"] + "/" + each["metadata"]["name"]: each
             for file in kustomization["resources"] for each in documents(folder / file)}  # fmt: skip
    for patch in kustomization.get("patches", ()):
        [operations] = documents(folder / patch["path"])
        apply(operations, found[f"{patch['target']['kind']}/{patch['target']['name']}"])
    for image in kustomization.get("images", ()):
        for container in containers(list(found.values())):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return found


def containers(document):
    """All containers, at any depth."""
    inner = list(document.values()) if isinstance(document, dict) else document if isinstance(document, list) else []
    found = [each for value in inner for each in containers(value)]
    return found + (document.get("containers", []) if isinstance(document, dict) else [])


def pod(workload):
    return workload["spec"]["template"]["spec"]


def apply(operations, document):
    """Changes a document by the "add" operations of RFC 6902."""
    for operation in operations:
        assert operation["op"] == "add"
        *path, last = operation["path"].strip("/").split("/")
        at = document
        for step in path:
            at = at[int(step)] if isinstance(at, list) else at[step]
        value = copy.deepcopy(operation["value"])
        if isinstance(at, list):
            at.insert(len(at) if last == "-" else int(last), value)
        else:
            at[last] = value
