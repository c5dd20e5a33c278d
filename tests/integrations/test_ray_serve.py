"""Ray Serve with llamabatch: two replicas behind one address, their router, killed engines and replicas, batches."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import tempfile
import threading
import time
from types import SimpleNamespace

import httpx
import psutil
import pytest

pytest.importorskip("ray.serve", reason="needs ray (make test-scale)")
pytest.importorskip("openai", reason="needs openai (make test-scale)")

import openai
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingContext
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.request_router import ReplicaID

from llamabatch.errors import ConfigError, ModelFileError, SetupError, UnknownOptionError
from llamabatch.integrations import ray_router
from llamabatch.integrations.ray import serve_app
from llamabatch.integrations.ray_cluster import Node
from llamabatch.integrations.ray_replies import Reply
from llamabatch.integrations.ray_router import Load, Prefix, PrefixRouter, PrefixTable, SlotScaling, load_of, order
from llamabatch.integrations.ray_serve import Call, Engines, build, ingress_app
from llamabatch.server.options import ServerOptions

pytestmark = pytest.mark.filterwarnings("default")  # Ray itself warns

HEADER = "x-llamabatch-replica"
NOTHING = Prefix()
LONG = "There was a king who had three sons, and a fox that spoke. " * 8


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Removes the variable with which `make test-scale` puts HAProxy before the cluster. It must not affect the code
    that this process runs itself."""
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path, for Ray's sockets
        ray.init(
            num_cpus=2, object_store_memory=200_000_000, include_dashboard=False, _temp_dir=folder, log_to_driver=False
        )
        yield
        children = psutil.Process().children(recursive=True)
        serve.shutdown()
        ray.shutdown()
        assert not psutil.wait_procs(children, timeout=30)[1]


@pytest.fixture(scope="module")
def client(cluster, tmp_path_factory):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    server = {"api_keys": ["secret"], "data_dir": str(tmp_path_factory.mktemp("shared")), "max_disk_bytes": 2**24}
    serve.run(serve_app("tiny", num_replicas=2, n_slots=2, n_threads=1, n_ctx=512, server_options=server))
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0, timeout=60) as made:
        yield made


def complete(client, prompt, **more):
    """Asks for a completion. Returns its text, its number of cached tokens, and its replica."""
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt=prompt, temperature=0, **{"max_tokens": 4, **more}
    )
    answer = raw.parse()
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens, raw.headers[HEADER]


def stream(client, max_tokens=300, n=1):
    return client.completions.create(
        model="tiny",
        prompt="Once upon a time",
        max_tokens=max_tokens,
        n=n,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def replicas():
    """Returns the processes of replicas that have an engine, by pid."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "Engines" in process.name() and process.children():
                found[process.pid] = process
    return found


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


def two_replicas():
    until(lambda: len(replicas()) == 2)
    until(lambda: serve.status().applications["default"].deployments["Engines"].replica_states == {"RUNNING": 2})


def busy():
    """Returns the number of continuations in flight in the busiest replica."""
    handle = serve.get_deployment_handle("Engines", "default")
    if not handle.is_initialized:  # RAY_SERVE_THROUGHPUT_OPTIMIZED=1 would run it on the caller's event loop
        handle._init(_run_router_in_separate_loop=True)
    return max(handle.record_routing_stats.remote().result()["in_flight"] for _ in range(6))


def generated(client):
    """Returns the number of generated tokens of each replica in /metrics, by the replica's name."""
    url = str(client.base_url).removesuffix("/v1/")
    answer = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer secret"})
    assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/plain")
    families = {each.name: each for each in text_string_to_metric_families(answer.text)}
    assert len(families) == answer.text.count("# TYPE ")  # each family is there once
    return {each.labels["replica"]: each.value for each in families["llamabatch:generation_tokens"].samples}


def test_openais_client_streamed_and_not(client):
    whole = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], temperature=0)
    assert whole.choices[0].message.content
    pieces = [chunk.choices[0].text for chunk in stream(client)]
    assert len(pieces) >= 2  # the outputs of fast steps are sent together, as by `llamabatch serve`
    text, _, _ = complete(client, "Once upon a time", max_tokens=300, extra_body={"ignore_eos": True})
    assert "".join(pieces) == text


def test_a_beginning_goes_where_it_is_while_that_has_free_slots(client):
    _, _, home = complete(client, LONG)
    seen = [complete(client, LONG + f"And {n}") for n in range(6)]
    assert {replica for _, _, replica in seen} == {home}
    assert min(cached for _, cached, _ in seen) > 100
    elsewhere, running = [], []
    for _ in range(2):  # takes both slots of the prefix's home replica
        raw = client.completions.with_raw_response.create(
            model="tiny", prompt=LONG, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        running.append(raw.parse())
        assert raw.headers[HEADER] == home
        next(iter(running[-1]))
    elsewhere = complete(client, LONG + "But where")[2]
    for each in running:
        each.close()
    assert elsewhere != home


def test_a_client_that_leaves_frees_its_slot(client):
    two_replicas()
    assert busy() == 0
    before = sum(until(lambda: len(now := generated(client)) == 2 and now).values())
    engines = [child for replica in replicas().values() for child in replica.children()]
    running = stream(client, 480, n=64)
    next(iter(running))
    for each in engines:
        each.suspend()  # while the engines are paused, the request stays in flight, however fast the machine is
    try:
        assert busy() > 2
        running.close()
    finally:
        for each in engines:
            each.resume()
    until(lambda: busy() == 0)
    assert sum(generated(client).values()) - before < 64 * 480 / 2


def test_keys_and_what_one_replica_alone_could_answer(client):
    url = str(client.base_url).removesuffix("/v1/")
    key = {"Authorization": "Bearer secret"}
    assert httpx.get(f"{url}/readyz").status_code == 200
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers=key).json()["data"][0]["id"] == "tiny"
    refused = httpx.get(f"{url}/slots", headers=key)
    assert refused.status_code == 501
    assert "each replica has its own" in refused.json()["error"]["message"]
    wrong = httpx.post(f"{url}/v1/completions", headers=key, json={"prompt": "a", "temperature": -1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")


def test_figures_of_all_replicas_in_one_place(client):
    two_replicas()
    url = str(client.base_url).removesuffix("/v1/")
    key = {"Authorization": "Bearer secret"}
    assert httpx.get(f"{url}/metrics").status_code == 401

    complete(client, "0 " + LONG)
    before = until(lambda: len(now := generated(client)) == 2 and now)
    _, _, replica = complete(client, "Once upon a time", max_tokens=5)
    until(lambda: generated(client) == {**before, replica: before[replica] + 5})
    assert httpx.get(f"{url}/load", headers=key).json()["server_load"] < 4
    assert httpx.post(f"{url}/reset_prefix_cache", headers=key).status_code == 200
    assert complete(client, "0 " + LONG)[1] == 0


def test_a_text_goes_on_after_kill_9_of_its_engine(client):
    two_replicas()
    expected = "".join(each.choices[0].text for each in stream(client))
    running = stream(client)
    pieces = [next(running).choices[0].text]
    for replica in replicas().values():
        for child in replica.children():
            os.kill(child.pid, signal.SIGKILL)
    pieces += [each.choices[0].text for each in running]
    assert "".join(pieces) == expected
    assert serve.status().applications["default"].deployments["Engines"].replica_states == {"RUNNING": 2}


def test_requests_are_answered_after_kill_9_of_their_replica(client):
    two_replicas()
    more = {"max_tokens": 300, "extra_body": {"ignore_eos": True}}
    expected = complete(client, "Once upon a time", **more)[0]
    answers = []

    def ask():
        answers.extend(complete(client, "Once upon a time", **more)[::2] for _ in range(6))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len({replica for _, replica in answers}) == 2, 20)
    os.kill(next(iter(replicas())), signal.SIGKILL)  # both replicas have requests
    for thread in threads:
        thread.join()
    assert [text for text, _ in answers] == [expected] * 24
    assert complete(client, "Next")[2]
    two_replicas()


def test_a_stream_whose_replica_is_gone_ends_with_an_error(client):
    two_replicas()
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="Once upon", max_tokens=480, stream=True, extra_body={"ignore_eos": True}
    )
    running = raw.parse()
    next(iter(running))
    for pid in list(replicas()):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="the replica that answered is gone; send the request again"):
        list(running)
    two_replicas()


def test_a_batch_ends_after_its_replica_was_killed(client):
    two_replicas()
    keepers = until(lambda: [pid for pid in replicas() if has_folder(pid)], 20)
    assert len(keepers) == 1
    lines = [
        {
            "custom_id": f"row {n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"Once upon a time {n}", "max_tokens": 200, "ignore_eos": True, "seed": 1},
        }
        for n in range(60)
    ]
    given = "\n".join(map(json.dumps, lines)).encode()

    def retried(call):
        def tried():
            with contextlib.suppress(openai.APIStatusError):
                return call()

        return until(tried, 30)

    file = retried(lambda: client.files.create(file=("rows.jsonl", given), purpose="batch"))
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 5, 30)
    os.kill(keepers[0], signal.SIGKILL)
    ended = until(
        lambda: (found := retried(lambda: client.batches.retrieve(batch.id))).status == "completed" and found, 90
    )
    results = [json.loads(line) for line in client.files.content(ended.output_file_id).text.splitlines()]
    assert sorted(each["custom_id"] for each in results) == sorted(line["custom_id"] for line in lines)
    assert has_folder(next(pid for pid in replicas() if pid != keepers[0])) or len(replicas()) == 2


def test_running_requests_end_when_the_application_is_deleted(client):
    two_replicas()
    running = stream(client, 480)
    pieces = [next(running)]
    deleting = threading.Thread(target=serve.delete, args=("default",))
    deleting.start()
    pieces += running
    deleting.join()
    assert pieces[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.APIStatusError):
        complete(client, "Next")


def has_folder(pid):
    with contextlib.suppress(psutil.Error):
        return any(each.path.endswith("/lock") and "shared" in each.path for each in psutil.Process(pid).open_files())
    return False


def test_the_address_of_a_configuration_file(cluster):
    made = build({"model": "tiny", "num_replicas": [1, 2], "n_slots": 2, "n_threads": 1})
    assert isinstance(made, serve.Application)


def test_nodes_that_are_starting_are_waited_for(monkeypatch):
    head = {"Alive": True, "NodeID": "head", "Resources": {}}
    seen = iter([[head], [head, {"Alive": True, "NodeID": "worker", "Resources": {"CPU": 4.0}}]])
    monkeypatch.setattr(ray, "nodes", lambda: next(seen))
    assert [node.cpus for node in Node.wait()] == [4]
    monkeypatch.setattr(ray, "nodes", lambda: [head])
    with pytest.raises(SetupError, match="none of 1 node of the cluster has a CPU"):
        Node.wait(0.0)


def test_errors_of_arguments_come_at_once(cluster, tmp_path):
    with pytest.raises(ConfigError, match="num_replicas is 0; give a whole number from 1"):
        serve_app("tiny", num_replicas=0)
    with pytest.raises(ConfigError, match="fewest replicas of num_replicas is 3; give a whole number from 1 to 2"):
        serve_app("tiny", num_replicas=(3, 2))
    with pytest.raises(ConfigError, match="target_occupancy is 2; give a number above 0"):
        serve_app("tiny", target_occupancy=2)
    with pytest.raises(ConfigError, match=r"has port, which does not go with Ray Serve: give it to serve\.start"):
        serve_app("tiny", server_options={"port": 80})
    with pytest.raises(ConfigError, match="batches, which need data_dir"):
        serve_app("tiny", server_options={"batches": True})
    with pytest.raises(UnknownOptionError, match="no option 'colour'"):
        serve_app("tiny", server_options={"colour": 1})
    with pytest.raises(ConfigError, match="n_slots is 0"):
        serve_app("tiny", n_slots=0)
    with pytest.raises(ModelFileError, match=r"none\.gguf"):
        serve_app(tmp_path / "none.gguf", num_replicas=1)


# The tests below need no cluster: they test the ingress with fake replicas, the router, and the policy.


def asked_of(
    respond, method="POST", path="/v1/completions", client=("127.0.0.1", 1), body=b"{}", replies=(), **options
):
    async def ask_all(call):
        if isinstance(replies, Exception):
            raise replies
        return list(replies)

    async def ask():
        transport = httpx.ASGITransport(ingress_app(respond, ask_all, ServerOptions(**options)), client=client)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await http.request(method, path, content=body)

    return asyncio.run(ask())


class Response:
    """A fake response of a replica: messages, then an error or the end."""

    def __init__(self, messages=(), error=None):
        self.messages, self.error = messages, error

    async def __aiter__(self):
        for each in self.messages:
            yield [each]
        if self.error is not None:
            raise self.error

    def cancel(self):
        pass


def start(kind=b"text/plain"):
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}


def body(text, more=False):
    return {"type": "http.response.body", "body": text, "more_body": more}


def test_a_request_that_has_no_answer_yet_goes_to_another_replica():
    calls = []

    def respond(call):
        calls.append(call)
        return Response(error=RayActorError()) if len(calls) < 3 else Response([start(), body(b"ok")])

    answer = asked_of(respond, body=b'{"prompt": "a"}')
    assert (answer.status_code, answer.text, len(calls)) == (200, "ok", 3)
    assert {call.body for call in calls} == {b'{"prompt": "a"}'}
    calls.clear()
    gone = asked_of(lambda call: calls.append(call) or Response(error=RayActorError()))
    assert (gone.status_code, gone.json()["error"]["code"], len(calls)) == (503, "replica_gone", 3)
    calls.clear()
    full = asked_of(lambda call: calls.append(call) or Response(error=BackPressureError(1, 1)))
    assert (full.status_code, len(calls)) == (503, 1)


def test_replies_of_all_replicas_are_joined():
    def texts(path, *bodies, method="GET"):
        replies = [Reply(f"r{n}", 200, b"text/plain", each) for n, each in enumerate(bodies)]
        return asked_of(None, method, path, replies=replies).text

    first = b'# HELP a Some {text}.\n# TYPE a counter\na_total{m="x y"} 1.0\n# HELP b B.\n# TYPE b gauge\nb 2.0\n'
    second = b"# HELP b B.\n# TYPE b gauge\nb 3.0\n"
    assert texts("/metrics", first, second).splitlines() == [
        *("# HELP a Some {text}.", "# TYPE a counter", 'a_total{replica="r0",m="x y"} 1.0'),
        *("# HELP b B.", "# TYPE b gauge", 'b{replica="r0"} 2.0', 'b{replica="r1"} 3.0'),
    ]
    assert json.loads(texts("/load", b'{"server_load": 2}', b'{"server_load": 3}')) == {"server_load": 5}
    assert texts("/reset_prefix_cache", b"", b"", method="POST") == ""
    loading = Reply("r1", 503, b"application/json", b"{}")
    one_fails = asked_of(None, "POST", "/reset_prefix_cache", replies=[Reply("r0", 200, b"", b""), loading])
    assert (one_fails.status_code, one_fails.text) == (503, "{}")
    for replies in ((), TimeoutError("no replies"), DeploymentUnavailableError("engines")):
        none = asked_of(None, "GET", "/metrics", replies=replies)
        assert (none.status_code, none.json()["error"]["code"]) == (503, "replica_gone")


@pytest.mark.parametrize(
    ("path", "event"), [("/v1/completions", b'data: {"error": {'), ("/v1/messages", b'event: error\ndata: {"type": ')]
)
def test_a_stream_that_breaks_has_the_event_of_its_dialect(path, event):
    messages = [start(b"text/event-stream; charset=utf-8"), body(b"data: 1\n\n", more=True)]
    answer = asked_of(lambda _: Response(messages, RayActorError()), path=path)
    assert answer.content.startswith(b"data: 1\n\n" + event)
    assert b"replica_gone" in answer.content or path == "/v1/messages"
    assert answer.content.endswith(b"\n\n")


def test_another_machine_needs_a_key():
    def respond(_):
        return Response([start(), body(b"ok")])

    assert asked_of(respond).status_code == 200
    refused = asked_of(respond, client=("192.0.2.1", 1))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "key_needed")
    assert asked_of(respond, client=("192.0.2.1", 1), no_key=True).status_code == 200
    assert asked_of(respond, client=("192.0.2.1", 1), api_keys=["a"]).status_code == 401
    assert asked_of(respond, path="/v1/files", batches=False).status_code == 501


def test_behind_haproxy_any_caller_needs_a_key(monkeypatch):
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")

    def respond(_):
        return Response([start(), body(b"ok")])

    refused = asked_of(respond)  # the request comes from HAProxy's address, as all requests do
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "key_needed")
    assert asked_of(respond, no_key=True).status_code == 200
    assert asked_of(respond, api_keys=["a"]).status_code == 401
    with pytest.raises(ConfigError, match="give serve_app api_keys among server_options, or no_key=True"):
        serve_app("tiny")


def test_a_replica_is_well_until_its_engine_is_gone_for_good():
    replica = object.__new__(Engines)
    for state in ("loading", "ready", "restarting", "draining"):
        replica._serving = SimpleNamespace(state=state, error=None)
        replica.check_health()
    replica._serving = SimpleNamespace(state="failed", error="nine deaths")
    with pytest.raises(RuntimeError, match="the engine has ended: nine deaths"):
        replica.check_health()
    replica._serving = None  # so that the replica closes nothing at its end


def prefix(*texts):
    return Prefix.of_pieces([(text, True) for text in texts])


def chat(*turns):
    messages = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    return Prefix.of("/v1/chat/completions", json.dumps({"messages": messages}).encode())


def test_the_beginnings_of_prompts():
    assert prefix("a" * 1000).lengths == (256, 512, 768, 1000)
    assert prefix("a" * 1000).keys[:3] == prefix("a" * 999).keys[:3]
    assert prefix("a" * 600, "b").keys != prefix("a" * 601).keys
    assert prefix("short").keys == ()  # computing so short a prompt again is faster than routing by it
    first, second = chat("a" * 300), chat("a" * 300, "b" * 5000, "c")
    assert first.keys[-1] in second.worth_it()  # the length of the answer does not matter
    assert chat("a" * 300, "x" * 5000, "c").keys[-1] not in second.keys
    assert Prefix.of("/v1/completions", b"{") == Prefix.of("/v1/embeddings", b'{"input": "a"}') == Prefix()
    listed = Prefix.of("/v1/completions", json.dumps({"prompt": ["a" * 300, "b"]}).encode())
    assert listed == Prefix.of("/v1/completions", json.dumps({"prompt": "a" * 300}).encode())
    parts = Prefix.of("/v1/messages", json.dumps({"system": "s" * 300, "messages": [{"role": "user"}]}).encode())
    assert parts.lengths[0] == 256
    many = prefix(*["a" * 300] * 1000)
    assert len(many.keys) <= 128
    assert many.length == 300_000
    assert prefix("a" * 256 + "b" * 1000).worth_it()[-1] not in prefix("a" * 256 + "c" * 1000).keys


def test_a_table_of_beginnings_forgets_the_dead_and_the_old():
    table = PrefixTable(most=6)
    table.remember(prefix("a" * 600), "one")
    table.remember(prefix("a" * 600), "two")
    table.remember(prefix("b" * 600), "one")
    assert next(table.holders(prefix("a" * 600))) == {"one", "two"}
    table.keep(["two"])
    assert list(table.holders(prefix("b" * 600))) == []
    assert next(table.holders(prefix("a" * 600))) == {"two"}
    for n in range(10):
        table.remember(prefix(str(n) * 600), "two")
    assert len(table) == 6
    assert list(table.holders(prefix("a" * 600))) == []


def test_the_order_of_replicas():
    loads = {"one": Load(1, 2), "two": Load(0, 2), "three": Load(3, 2)}
    assert order(loads) == ["two", "one", "three"]
    assert order(loads, [{"one"}]) == ["one", "two", "three"]
    assert order(loads, [{"three"}]) == ["two", "one", "three"]  # its home has no free slot
    assert order(loads, [{"three"}, {"one", "three"}]) == ["one", "two", "three"]
    assert order({"one": Load(8, 32), "two": Load(2, 4)})[0] == "one"
    assert {order({"one": Load(0, 2), "two": Load(0, 2)})[0] for _ in range(100)} == {"one", "two"}
    assert load_of({}, None, 4) == Load(0, 4)  # the replica has reported nothing yet
    assert load_of({"slots": 8, "in_flight": 5, "calls": 2}, None, 4) == Load(5, 8)
    assert load_of({"slots": 8, "in_flight": 5, "calls": 2}, 3, 4, n_sending=1) == Load(7, 8)


def test_the_router_behind_serves_interface():
    deployment = ray_router.RequestRouter.__init__.__globals__["DeploymentID"]("Engines", "default")
    ids = [ReplicaID(name, deployment) for name in ("one", "two")]

    async def queue_len(deadline_s):
        return 0

    def replica(replica_id, **stats):
        return SimpleNamespace(
            replica_id=replica_id, routing_stats=stats, get_queue_len=queue_len, max_ongoing_requests=100
        )

    def pending(name, beginning=NOTHING, needs_batches=False):
        call = Call({}, b"", beginning, needs_batches)
        return SimpleNamespace(args=[call], metadata=SimpleNamespace(internal_request_id=name))

    async def run():
        source = SimpleNamespace(value="REPLICA")
        router = PrefixRouter(deployment, source, use_replica_queue_len_cache=True)
        router.initialize_state(n_slots=2)
        both = [replica(ids[0]), replica(ids[1], slots=2, in_flight=0, calls=0, batches=True)]
        router.update_replicas(both)
        await asyncio.sleep(0)

        async def chosen(asked):
            found = await router.choose_replicas(both, asked)
            assert all(len(each) == 1 for each in found)
            return [each[0].replica_id for each in found]

        first = pending("first", prefix(LONG))
        [home, other] = await chosen(first)
        router.on_request_routed(first, home, None)
        assert (await chosen(pending("second", prefix(LONG))))[0] == home
        assert (await chosen(pending("third", prefix(LONG))))[0] == home  # the second request has not started yet
        assert (await chosen(pending("fourth", prefix(LONG))))[0] == other  # both slots are reserved
        assert (await chosen(pending("files", needs_batches=True)))[0] == ids[1]
        assert len(await chosen(None)) == 2
        router._sending.clear()
        router.on_replica_actor_died(home)
        assert list(router._table.holders(prefix(LONG))) == []

    asyncio.run(run())


def test_the_number_of_replicas_follows_what_runs_and_waits():
    def decided(in_flight, slots, current=1, occupancy=0.8):
        metrics = {
            "in_flight": {f"r{n}": each for n, each in enumerate(in_flight)},
            "slots": {f"r{n}": each for n, each in enumerate(slots)},
        }
        unused = {"total_num_requests": 0, "total_queued_requests": 0, "raw_metrics": {}, "policy_state": {}}
        unused |= dict.fromkeys(("last_scale_up_time", "last_scale_down_time", "current_time", "config"))
        unused |= {"deployment_id": None, "deployment_name": "Engines", "app_name": "default", "running_replicas": []}
        context = AutoscalingContext(
            **unused,
            current_num_replicas=current,
            target_num_replicas=current,
            aggregated_metrics=metrics,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=8,
        )
        return SlotScaling(occupancy)(context)[0]

    assert decided([0], [32]) == 1
    assert decided([25], [32]) == 1
    assert decided([26], [32]) == 2
    assert decided([32 + 60], [32]) == 4  # 60 requests wait
    assert decided([10, 5, 0], [32, 32, 32], current=3) == 1
    assert decided([32, 32], [32, 32], current=2, occupancy=1.0) == 2
    assert decided([], [], current=3) == 3  # no replica has reported yet
