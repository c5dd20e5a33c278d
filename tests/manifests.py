"""Makes the manifests of deploy/kubernetes as kustomize does, with those of its features that the folders use:
resources, generated ConfigMaps, images, patches and replacements. It adds no labels."""

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
    """Returns the objects of a folder by "Kind/name"."""
    folder = DEPLOY / "kubernetes" / name
    [kustomization] = documents(folder / "kustomization.yaml")
    found = {}
    for resource in kustomization["resources"]:
        if (folder / resource).is_dir():
            found |= rendered((folder / resource).resolve().name)
        else:
            found |= {f"{each['kind']}/{each['metadata']['name']}": each for each in documents(folder / resource)}
    for made in kustomization.get("configMapGenerator", ()):
        data = {file: (folder / file).read_text(encoding="utf-8") for file in made["files"]}
        metadata = {"name": made["name"], "labels": made["options"]["labels"]}
        found[f"ConfigMap/{made['name']}"] = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": data,
        }
    for patch in kustomization.get("patches", ()):
        [operations] = documents(folder / patch["path"])
        apply(operations, found[f"{patch['target']['kind']}/{patch['target']['name']}"])
    for image in kustomization.get("images", ()):
        for container in containers(list(found.values())):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    for each in kustomization.get("replacements", ()):
        source = each["source"]
        value = at(source["fieldPath"].split("."), found[f"{source['kind']}/{source['name']}"])
        for target in each["targets"]:
            for path in target["fieldPaths"]:
                *steps, last = path.split(".")
                at(steps, found[f"{target['select']['kind']}/{target['select']['name']}"])[last] = value
    return found


def containers(document):
    """Returns all containers of a document, at any depth."""
    inner = list(document.values()) if isinstance(document, dict) else document if isinstance(document, list) else []
    found = [each for value in inner for each in containers(value)]
    own = document if isinstance(document, dict) else {}
    return found + own.get("initContainers", []) + own.get("containers", [])


def pod(workload):
    return workload["spec"]["template"]["spec"]


def apply(operations, document):
    """Changes a document by the "add" operations of RFC 6902."""
    for operation in operations:
        assert operation["op"] == "add"
        *path, last = operation["path"].strip("/").split("/")
        parent = at(path, document)
        value = copy.deepcopy(operation["value"])
        if isinstance(parent, list):
            parent.insert(len(parent) if last == "-" else int(last), value)
        else:
            parent[last] = value


def at(path, document):
    """Returns the value at a path of names and indices."""
    for step in path:
        document = document[int(step)] if isinstance(document, list) else document[step]
    return document
