"""deploy/: its manifests are right about the server, its metrics and its exit codes."""

import json
import math
import os
import re
import subprocess

import pytest

from llamabatch.tools.plan.kubernetes import MODELS
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
    """Returns the names of all samples of a server whose engine has done nothing yet."""
    pytest.importorskip("starlette")
    pytest.importorskip("prometheus_client")
    from llamabatch.engine.stats import EngineStats
    from llamabatch.server.monitor.metrics import Metrics

    return names_in(Metrics("tiny").text(EngineStats()))


def names_in(text):
    lines = text.decode().splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if line and not line.startswith("#")}


def option(container, flag):
    [value] = [each.partition("=")[2] for each in container["args"] if each.partition("=")[0] == flag]
    return value


@pytest.mark.parametrize("name", FOLDERS)
def test_each_file_of_a_folder_is_used_and_each_name_is_there(name):
    assert rendered(name)
    folder = DEPLOY / "kubernetes" / name
    [kustomization] = documents(folder / "kustomization.yaml")
    used = {each for each in kustomization["resources"] if not each.startswith("../")}
    used |= {each["path"] for each in kustomization.get("patches", ())}
    used |= {file for each in kustomization.get("configMapGenerator", ()) for file in each["files"]}
    values = {"prometheus-adapter.yaml"}  # values for another chart
    assert {file.name for file in folder.iterdir()} - values == {"kustomization.yaml", *used}
    assert {each["newTag"] for each in kustomization.get("images", ())} <= {__version__}


def test_ray_serve_has_the_proxy_that_its_page_recommends():
    page = (ROOT / "docs" / "ray_serve.md").read_text(encoding="utf-8")
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
    assert ray["submissionMode"] == "HTTPMode"  # the network policy admits only the sender of this mode
    words = ray["entrypoint"].split()
    assert words[:2] == ["llamabatch", "run"]
    given = run.make_context("run", words[2:]).params
    assert (given["address"], given["output"]) == ("auto", "/work/results.jsonl")
    assert given["shards"] >= workers["maxReplicas"]


@pytest.mark.parametrize("name", ["serve", "serve-fetch", "job"])
def test_a_pod_needs_no_root_and_writes_to_volumes_alone(name):
    kind = "Job" if name == "job" else "Deployment"
    spec = pod(rendered(name)[f"{kind}/llamabatch"])
    [container] = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] > 0
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert spec["automountServiceAccountToken"] is False
    # a Service named llamabatch would set LLAMABATCH_PORT=tcp://..., which is also an option of ours
    assert spec["enableServiceLinks"] is False
    mounted = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert {each["name"] for each in mounted.values()} == {each["name"] for each in spec["volumes"]}
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert f"USER {spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}" in image
    [cache] = re.findall(r"LLAMABATCH_CACHE=(\S+)", image)
    assert not mounted[cache].get("readOnly")
    assert not mounted["/tmp"].get("readOnly")
    env = {each["name"]: each["value"] for each in container["env"]}
    assert mounted[MODELS]["readOnly"]
    assert env["LLAMABATCH_MODEL"] == "tiny"  # the memory is set for this model
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
    from llamabatch.server.http import security
    from llamabatch.server.monitor import health

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


def test_the_dashboard_reads_series_that_there_are(series):
    from llamabatch.engine.stats import EngineStats
    from llamabatch.monitor.host import MachineSample
    from llamabatch.server.http.counts import HttpCounts
    from llamabatch.server.monitor.metrics import Metrics

    http = HttpCounts()
    http.add({"method": "POST", "path": "/"}, 200, 0.1)
    machine = MachineSample(cpu_percent=1.0, memory_bytes=1)
    served = names_in(Metrics("tiny").text(EngineStats(), machine=machine, http=http))
    config = rendered("monitoring")["ConfigMap/llamabatch-dashboard"]
    assert config["metadata"]["labels"] == {"grafana_dashboard": "1"}
    dashboard = json.loads(config["data"]["dashboard.json"])
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    for query in queries:
        names = set(re.findall(r"\b(?:llamabatch:|http_)\w+", query))
        assert names
        assert names <= served, query
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(set(places)) == len(places)


def pods():
    """Yields the labels and the spec of each kind of pod, and a name for messages."""
    for folder in FOLDERS:
        for name, made in rendered(folder).items():
            spec = made.get("spec", {})
            cluster = spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or {}
            groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]] if cluster else []
            templates = [each["template"] for each in groups] + ([spec["template"]] if "template" in spec else [])
            for template in templates:
                yield f"{folder}: {name}", template["metadata"]["labels"], template["spec"]


def bytes_of(quantity):
    number, unit = re.fullmatch(r"(\d+)([MG]i)", quantity).groups()
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


def test_a_pod_may_fill_its_volumes():
    for name, _, spec in pods():
        [container] = spec["containers"]
        volumes = [each["emptyDir"]["sizeLimit"] for each in spec["volumes"] if "emptyDir" in each]
        limit = bytes_of(container["resources"]["limits"]["ephemeral-storage"])
        assert sum(map(bytes_of, volumes)) < limit, name


def test_pods_are_spread_by_their_own_labels():
    spread = {}
    for name, labels, spec in pods():
        for each in spec.get("topologySpreadConstraints", ()):
            assert each["whenUnsatisfiable"] == "ScheduleAnyway"  # one node is enough for all pods
            assert each["labelSelector"]["matchLabels"].items() <= labels.items(), name
            spread.setdefault(name.partition(":")[0], []).append(each["topologyKey"])
    zones = ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    assert spread == {
        **dict.fromkeys(("serve", "serve-fetch", "ray-serve"), zones),
        **dict.fromkeys(("job", "rayjob"), zones[1:]),
    }


@pytest.mark.parametrize("folder", ["ray-serve", "rayjob"])
def test_rays_ports_are_open_to_the_cluster_and_its_operator_alone(folder):
    [policy] = [each["spec"] for each in rendered(folder).values() if each["kind"] == "NetworkPolicy"]
    cluster = policy["podSelector"]["matchLabels"]
    found = [labels for name, labels, _ in pods() if name.startswith(f"{folder}:")]
    assert len(found) == 2  # head and workers
    assert all(cluster.items() <= labels.items() for labels in found)
    assert policy["policyTypes"] == ["Ingress"]
    inside, *others = policy["ingress"]
    assert inside == {"from": [{"podSelector": {"matchLabels": cluster}}]}
    for rule in others:
        ports = {each["port"] for each in rule["ports"]}
        assert all("podSelector" in each or "namespaceSelector" in each for each in rule["from"])
        is_operator = "kuberay-operator" in str(rule["from"])
        assert ports <= ({"dashboard", "serve", 8265} if is_operator else {"serve"})


def test_a_fetched_model_is_where_the_server_looks_for_it(tmp_path):
    spec = pod(rendered("serve-fetch")["Deployment/llamabatch"])
    [fetch], [server], volume = spec["initContainers"], spec["containers"], spec["volumes"][0]
    assert fetch["image"] == server["image"]
    assert "images" not in documents(DEPLOY / "kubernetes" / "serve-fetch" / "kustomization.yaml")[0]  # named only once
    assert fetch["securityContext"] == server["securityContext"]
    assert (volume["name"], volume["persistentVolumeClaim"]["readOnly"]) == ("models", False)
    mounts = {each["name"]: each for each in fetch["volumeMounts"]}
    assert mounts["models"] == {"name": "models", "mountPath": MODELS}
    env = {each["name"]: each["value"] for each in fetch["env"]}
    assert all(env[name].startswith(MODELS + "/") for name in ("LLAMABATCH_CACHE", "HF_HOME"))
    cache, models = tmp_path / "cache", tmp_path / "models"
    cache.mkdir()
    models.mkdir()
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "a-00001-of-00002.gguf.json"):
        (cache / name).write_text(name)
    program = tmp_path / "llamabatch"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho "{cache}/a-00001-of-00002.gguf"\n')
    program.chmod(0o755)
    [line] = fetch["args"]
    command = [*fetch["command"], line.replace(MODELS, str(models))]
    named = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "https://models.example.com/a b.gguf"}
    for _ in range(2):  # a second pod finds the file
        subprocess.run(command, check=True, env=named)
    assert (tmp_path / "asked").read_text() == "pull https://models.example.com/a b.gguf\n" * 2
    assert {each.name: each.read_text() for each in models.iterdir()} == {
        name: name for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf")
    }


def test_the_autoscaler_reads_what_the_adapter_gives(series):
    [autoscaler] = rendered("autoscaling").values()
    [metric] = autoscaler["spec"]["metrics"]
    [values] = documents(DEPLOY / "kubernetes" / "autoscaling" / "prometheus-adapter.yaml")
    [rule] = values["rules"]["custom"]
    [name] = OWN.findall(rule["seriesQuery"])
    assert name in series
    given = re.sub(rule["name"]["matches"], rule["name"]["as"].replace("${1}", r"\1"), name)
    assert metric["pods"]["metric"]["name"] == given
    assert series >= {name}
    target = autoscaler["spec"]["scaleTargetRef"]
    made = rendered("serve")[f"{target['kind']}/{target['name']}"]
    assert "replicas" not in made["spec"]  # otherwise each `kubectl apply` would reset the number of replicas


@pytest.mark.parametrize(
    ("pods", "running", "waiting", "wanted"),
    [(4, 32, 1, 6), (4, 32, 0, 5), (1, 32, 32, 3), (4, 25, 0, 4), (4, 8, 0, 2), (4, 0, 0, 1)],
)
def test_the_autoscaler_keeps_busy_pods(pods, running, waiting, wanted):
    """The rule of a HorizontalPodAutoscaler: add the values of all pods, divide by the target, round up."""
    from llamabatch.engine.stats import EngineStats
    from llamabatch.monitor.prometheus import gauges

    [autoscaler] = rendered("autoscaling").values()
    [metric] = autoscaler["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"].removeprefix("llamabatch_")
    quantity = metric["pods"]["target"]["averageValue"]
    target = int(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
    value = gauges(EngineStats(running=running, waiting=waiting, free_slots=32 - running))[name]
    assert max(autoscaler["spec"]["minReplicas"], math.ceil(round(pods * value / target, 6))) == wanted


@pytest.mark.parametrize("name", ["serve", "job"])
def test_the_memory_of_a_pod_is_that_of_the_model_that_it_loads(name):
    """Without its patch, the file names neither memory nor model: another model in the volume changes nothing there."""
    folder = DEPLOY / "kubernetes" / name
    [bare] = documents(folder / {"serve": "deployment.yaml", "job": "job.yaml"}[name])
    [container] = pod(bare)["containers"]
    assert "resources" not in container
    assert "LLAMABATCH_MODEL" not in {each["name"] for each in container["env"]}
    text = (folder / "resources.yaml").read_text(encoding="utf-8")
    assert text.startswith("# tiny: ")
    [operations] = documents(folder / "resources.yaml")
    assert {"name": "LLAMABATCH_MODEL", "value": "tiny"} in [each["value"] for each in operations]


def test_the_job_has_a_shard_for_each_index(job):
    [container] = pod(job)["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert int(env["SHARDS"]) == job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed"
    [line] = container["args"]
    assert '--shard "$((JOB_COMPLETION_INDEX+1))/${SHARDS}"' in line
    assert line.startswith("exec ")  # with a shell as the first process, SIGTERM would not reach the job
    [index] = [each for each in job["spec"]["podFailurePolicy"]["rules"] if each["action"] == "FailIndex"]
    table = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
    for code in index["onExitCodes"]["values"]:  # the same command would fail again
        assert re.search(rf"^\| {code} \| (some rows are errors|usage)", table, flags=re.M)


def test_the_readme_names_each_folder_and_says_what_was_not_tried():
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert all(f"kubernetes/{name}" in text for name in FOLDERS)
    assert "## Untested" in text
