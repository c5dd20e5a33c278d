"""deploy/: what the manifests say of the server, its metrics and its exit codes holds."""

import re

import pytest

from llamabatch.utils.version import __version__
from tests.manifests import DEPLOY, FOLDERS, ROOT, documents, pod, rendered

OWN = re.compile(r"\b(?:llamabatch|vllm|llamacpp):\w+")


@pytest.fixture(scope="module")
def server():
    return rendered("serve")["Deployment/llamabatch"]


@pytest.fixture(scope="module")
def job():
    return rendered("job")["Job/llamabatch"]


@pytest.fixture(scope="module")
def series():
    """Names of the samples that a server has, an engine that has done nothing included."""
    pytest.importorskip("starlette")
    pytest.importorskip("prometheus_client")
    from llamabatch.engine.stats import EngineStats
    from llamabatch.server.metrics import Metrics

    text = Metrics("tiny").text(EngineStats()).decode()
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if line and not line.startswith("#")}


def option(container, flag):
    [value] = [each.partition("=")[2] for each in container["args"] if each.partition("=")[0] == flag]
    return value


@pytest.mark.parametrize("name", FOLDERS)
def test_each_file_of_a_folder_is_used_and_each_name_is_there(name):
    assert rendered(name)
    folder = DEPLOY / "kubernetes" / name
    [kustomization] = documents(folder / "kustomization.yaml")
    used = {*kustomization["resources"], *(each["path"] for each in kustomization.get("patches", ()))}
    values = {"prometheus-adapter.yaml"}  # of another chart
    assert {file.name for file in folder.iterdir()} - values == {"kustomization.yaml", *used}
    assert {each["newTag"] for each in kustomization.get("images", ())} <= {__version__}


def test_ray_serve_has_the_proxy_that_its_page_recommends():
    page = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
    wanted = dict(re.findall(r"\b(RAY_SERVE_[A-Z_]+)=(\w+)", page))
    cluster = rendered("ray-serve")["RayService/llamabatch"]["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        assert {each["name"]: each["value"] for each in container["env"]} == wanted


def test_the_ray_job_has_the_pods_of_the_job_and_a_command_that_is_understood():
    pytest.importorskip("psutil")
    from llamabatch.cli.run import run

    ray = rendered("rayjob")["RayJob/llamabatch"]["spec"]
    head, [workers] = ray["rayClusterSpec"]["headGroupSpec"], ray["rayClusterSpec"]["workerGroupSpecs"]
    wanted = pod(rendered("job")["Job/llamabatch"])
    for group in (head, workers):
        spec = group["template"]["spec"]
        for name in ("automountServiceAccountToken", "enableServiceLinks", "securityContext"):
            assert spec[name] == wanted[name]
        [container], [other] = spec["containers"], wanted["containers"]
        assert container["securityContext"] == other["securityContext"]
        assert container["volumeMounts"] == other["volumeMounts"]
        assert container["image"] == f"registry.example.com/llamabatch-ray:{__version__}"
        assert {each["name"] for each in spec["volumes"]} == {each["name"] for each in container["volumeMounts"]}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        claims = [each["persistentVolumeClaim"] for each in spec["volumes"] if "persistentVolumeClaim" in each]
        assert claims == [
            each["persistentVolumeClaim"] for each in wanted["volumes"] if "persistentVolumeClaim" in each
        ]
    assert head["rayStartParams"]["num-cpus"] == "0"
    words = ray["entrypoint"].split()
    assert words[:2] == ["llamabatch", "run"]
    given = run.make_context("run", words[2:]).params
    assert (given["address"], given["output"]) == ("auto", "/work/results.jsonl")
    assert given["shards"] >= workers["maxReplicas"]


@pytest.mark.parametrize("name", ["serve", "job"])
def test_a_pod_needs_no_root_and_writes_to_volumes_alone(name):
    kind = {"serve": "Deployment", "job": "Job"}[name]
    spec = pod(rendered(name)[f"{kind}/llamabatch"])
    [container] = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] > 0
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert spec["automountServiceAccountToken"] is False
    # a Service of the name llamabatch would give LLAMABATCH_PORT=tcp://..., which is an option of ours
    assert spec["enableServiceLinks"] is False
    mounted = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert {each["name"] for each in mounted.values()} == {each["name"] for each in spec["volumes"]}
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert f"USER {spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}" in image
    [cache] = re.findall(r"LLAMABATCH_CACHE=(\S+)", image)
    assert not mounted[cache].get("readOnly")
    assert not mounted["/tmp"].get("readOnly")
    env = {each["name"]: each["value"] for each in container["env"]}
    assert mounted[env["LLAMABATCH_MODEL"].rpartition("/")[0]]["readOnly"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert set(container["resources"]["limits"]) >= {"cpu", "memory"}


def test_claims_of_pods_are_made(server, job):
    claims = {each["metadata"]["name"] for each in rendered("storage").values()}
    wanted = {
        volume["persistentVolumeClaim"]["claimName"]
        for each in (server, job)
        for volume in pod(each)["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert wanted == claims


def test_a_pod_has_the_time_to_drain(server):
    run = pytest.importorskip("llamabatch.server.run")
    spec = pod(server)
    [container] = spec["containers"]
    waits = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    drain = float(option(container, "--drain-s"))
    assert spec["terminationGracePeriodSeconds"] >= waits + drain + run._FLUSH_S + 10


def test_probes_ask_what_needs_no_key(server):
    pytest.importorskip("starlette")
    from llamabatch.server import health, security

    [container] = pod(server)["containers"]
    paths = {route.path for route in health.routes}
    asked = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert asked == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/livez"}
    assert set(asked.values()) <= paths
    assert set(asked.values()) <= set(security.PUBLIC)
    [port] = container["ports"]
    assert port["containerPort"] == int(option(container, "--port"))


def test_labels_and_ports_meet(server):
    labels = server["spec"]["template"]["metadata"]["labels"]
    made = rendered("serve")
    [container] = pod(server)["containers"]
    [port] = container["ports"]
    [monitor] = [each for each in rendered("monitoring").values() if each["kind"] == "PodMonitor"]
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    service, policy = made["Service/llamabatch"]["spec"], made["NetworkPolicy/llamabatch"]["spec"]
    assert service["ports"][0]["targetPort"] == port["name"] == endpoint["port"]
    assert [each["port"] for each in policy["ingress"][0]["ports"]] == [port["name"]]
    for selector in (
        service["selector"],
        policy["podSelector"]["matchLabels"],
        made["PodDisruptionBudget/llamabatch"]["spec"]["selector"]["matchLabels"],
        monitor["spec"]["selector"]["matchLabels"],
        server["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert (
            not selector.items() <= rendered("job")["Job/llamabatch"]["spec"]["template"]["metadata"]["labels"].items()
        )
    [secret] = [each["secret"] for each in pod(server)["volumes"] if "secret" in each]
    assert endpoint["authorization"]["credentials"]["name"] == secret["secretName"]
    [keys] = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "keys"]
    assert option(container, "--api-key-file") == f"{keys}/{secret['items'][0]['path']}"


def test_flags_and_variables_are_those_of_the_commands(server, job):
    serve = pytest.importorskip("llamabatch.cli.serve").serve
    from llamabatch.cli.run import run

    for command, workload in ((serve, server), (run, job)):
        [container] = pod(workload)["containers"]
        flags = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
        assert set(re.findall(r"(?<!\S)(--[a-z-]+)", " ".join(container["args"]))) <= flags
        known = {each.envvar for each in command.params if isinstance(each.envvar, str)}
        given = {each["name"] for each in container["env"] if each["name"].startswith("LLAMABATCH_")}
        assert given <= known
        assert "LLAMABATCH_N_SLOTS" in given


def test_alerts_read_series_that_there_are(series):
    [alerts] = [each for each in rendered("monitoring").values() if each["kind"] == "PrometheusRule"]
    rules = [rule for group in alerts["spec"]["groups"] for rule in group["rules"]]
    told = " ".join(rule["expr"] for rule in rules)
    for rule in rules:
        assert OWN.findall(rule["expr"])
        assert set(OWN.findall(rule["expr"])) <= series, rule["alert"]
    assert 'finished_reason="error"' in told
    for name in ("request_queue_time", "request_success_total", "time_to_first_token"):
        assert name in told


def test_the_autoscaler_reads_what_the_adapter_gives(series):
    [autoscaler] = rendered("autoscaling").values()
    [metric] = autoscaler["spec"]["metrics"]
    [values] = documents(DEPLOY / "kubernetes" / "autoscaling" / "prometheus-adapter.yaml")
    [rule] = values["rules"]["custom"]
    [name] = OWN.findall(rule["seriesQuery"])
    assert name in series
    given = re.sub(rule["name"]["matches"], rule["name"]["as"].replace("${1}", r"\1"), name)
    assert metric["pods"]["metric"]["name"] == given
    target = autoscaler["spec"]["scaleTargetRef"]
    made = rendered("serve")[f"{target['kind']}/{target['name']}"]
    assert "replicas" not in made["spec"]  # else each `kubectl apply` would set them back


def test_the_job_has_a_shard_for_each_index(job):
    [container] = pod(job)["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert int(env["SHARDS"]) == job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed"
    [line] = container["args"]
    assert '--shard "$((JOB_COMPLETION_INDEX+1))/${SHARDS}"' in line
    assert line.startswith("exec ")  # a shell as the first process would keep SIGTERM to itself
    [index] = [each for each in job["spec"]["podFailurePolicy"]["rules"] if each["action"] == "FailIndex"]
    table = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
    for code in index["onExitCodes"]["values"]:  # the same command would end alike
        assert re.search(rf"^\| {code} \| (some are errors|usage)", table, flags=re.M)


def test_the_readme_names_each_folder_and_says_what_was_not_tried():
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert all(f"kubernetes/{name}" in text for name in FOLDERS)
    assert "## Untested" in text
