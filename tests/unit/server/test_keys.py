"""API keys: names, limits on requests and tokens, and files that are read again."""

import asyncio
import contextlib
import logging
import shutil
import ssl
import subprocess
import threading
from types import SimpleNamespace

import pytest
import uvicorn

from llamabatch.errors import ConfigError
from llamabatch.server.http import file_watch
from llamabatch.server.http.errors import ApiError
from llamabatch.server.http.file_watch import watch
from llamabatch.server.http.keys import KeyRing
from llamabatch.server.options import ServerOptions
from llamabatch.server.run import DrainingServer
from tests.unit.server.serving_clients import ready_client
from tests.waiting import until_soon

HELLO = {"messages": [{"role": "user", "content": "one"}]}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_key_has_a_name_and_limits_behind_it():
    keys = ServerOptions(api_keys="plain,sk-1 name=ada rpm=2 tpm=50").keys
    assert [tuple(key) for key in keys] == [("plain", "key1", None, None), ("sk-1", "ada", 2, 50)]
    assert "sk-1" not in repr(keys)


@pytest.mark.parametrize(
    "entry", ["sk rpm=0", "sk rpm=x", "sk name=", "sk name=a/b", "sk other=1", "sk secret", " sk\tx"]
)
def test_a_key_with_other_settings_is_refused_without_showing_it(entry):
    with pytest.raises(ConfigError) as caught:
        ServerOptions(api_keys=[entry])
    assert "secret" not in str(caught.value)
    assert "other" not in str(caught.value)


def test_requests_and_tokens_of_a_minute_are_limited():
    clock = Clock()
    ring = KeyRing(ServerOptions(api_keys="a name=ada rpm=2 tpm=50,b").keys, clock)
    ada, other = ring.find([b"a"]), ring.find([b"wrong", b"b"])
    assert ring.find([b"c"]) is None
    ada.enter()
    clock.now = 10.0
    ada.enter()
    with pytest.raises(ApiError, match="'ada' may use 2 requests a minute; try again in 50 s") as caught:
        ada.enter()
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "50")
    for _ in range(9):
        other.enter()
    clock.now = 60.0
    ada.spend(60)
    with pytest.raises(ApiError, match="50 tokens a minute; try again in 60 s"):
        ada.enter()
    clock.now = 120.0
    ada.enter()
    assert ring.counts()["ada"] == (3, 2, 60)
    assert ring.counts()["key2"] == (9, 0, 0)
    ring.replace(ServerOptions(api_keys="a name=ada rpm=1").keys)  # a key that stays keeps its counts
    with pytest.raises(ApiError, match="1 requests"):
        ring.find([b"a"]).enter()
    assert ring.find([b"b"]) is None


def test_a_file_of_keys_is_read_again(tmp_path, caplog, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("one name=ada\n")
    options = ServerOptions(api_keys="fixed", api_key_file=str(file))
    ring = KeyRing(options.keys)

    started, marks = threading.Event(), file_watch._marks
    monkeypatch.setattr(file_watch, "_marks", lambda paths: (marks(paths), started.set())[0])

    async def run():
        caplog.set_level(logging.INFO)
        seen = asyncio.Event()

        def reload():
            ring.replace(options.read_keys_again())
            loop.call_soon_threadsafe(seen.set)

        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(watch([str(file)], reload, "keys", 0.01))
        await until_soon(started.is_set)
        file.write_text("two name=ada rpm=5\n# of today, and longer\n")
        await seen.wait()
        assert ring.find([b"one"]) is None
        assert ring.find([b"two"]).key.rpm == 5
        assert ring.find([b"fixed"]) is not None
        file.write_text("")
        await until_soon(lambda: "cannot be read" in caplog.text)
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert ring.find([b"two"]) is not None


def test_a_file_is_read_once_two_looks_have_found_the_same(monkeypatch):
    looks = iter([["a"], ["cut"], ["whole"], [None], ["whole"], ["whole"], ["whole"], ["whole"]])
    seen, loads = [], []

    def look(paths):
        seen.append(next(looks, None))
        if seen[-1] is None:
            raise EOFError
        return seen[-1]

    monkeypatch.setattr(file_watch, "_marks", look)

    async def run():
        with contextlib.suppress(EOFError):
            await watch(["keys"], lambda: loads.append(len(seen)), "keys", 0.0)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert loads == [6]


def test_a_key_of_both_stays_where_it_is_gone_from_the_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("both\nof-file\n")
    options = ServerOptions(api_keys="both", api_key_file=str(file))
    file.write_text("other\n")
    assert [key.key for key in options.read_keys_again()] == ["both", "other"]


def test_keys_without_a_name_keep_their_numbers():
    ring = KeyRing(ServerOptions(api_keys="a,b,c name=ada").keys)
    ring.replace(ServerOptions(api_keys="b,d,c name=ada").keys)
    assert [ring.find([each]).key.name for each in (b"b", b"d", b"c")] == ["key2", "key1", "ada"]


def test_uses_of_a_second_are_one_entry_and_none_without_a_limit():
    clock = Clock()
    ring = KeyRing(ServerOptions(api_keys="a rpm=900 tpm=900,b").keys, clock)
    for use in (ring.find([b"a"]), ring.find([b"b"])):
        for step in range(200):
            clock.now = step / 100
            use.enter()
            use.spend(1)
        assert use.counts == (200, 0, 200)
    ring_of = [[len(used) for used in (use._requests, use._tokens)] for use in map(ring.find, ([b"a"], [b"b"]))]
    assert ring_of == [[2, 2], [0, 0]]


def test_names_of_keys_stand_in_logs_and_metrics_and_their_tokens_count(caplog):
    server = {"api_keys": ["sk-1 name=ada tpm=8"], "access_log": True, "metrics_without_key": True}
    with ready_client("one two three", server=server) as client:
        caplog.set_level(logging.INFO)
        auth = {"Authorization": "Bearer sk-1"}
        assert client.post("/v1/chat/completions", json=HELLO, headers=auth).status_code == 200
        streamed = client.post("/v1/chat/completions", json=HELLO | {"stream": True}, headers=auth)
        refused = streamed if streamed.status_code == 429 else client.post("/api/chat", json=HELLO, headers=auth)
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        text = client.get("/metrics").text
    assert 'llamabatch:key_requests_total{key="ada"}' in text
    [tokens] = [
        line.split()[-1] for line in text.splitlines() if line.startswith('llamabatch:key_tokens_total{key="ada"}')
    ]
    assert float(tokens) >= 8
    assert " ada POST /v1/chat/completions 200" in caplog.text
    assert " of ada failed: POST" in caplog.text
    assert "sk-1" not in caplog.text + text


def certificate(folder, name, *kind):
    """Returns a private key and its certificate."""
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    kind = kind or ("ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", *kind, "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return key.read_bytes(), cert.read_bytes()


def shown_certificate(context):
    """Returns the certificate that a new connection gets."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    client = asking.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return ssl.DER_cert_to_PEM_cert(client.getpeercert(binary_form=True)).split()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_a_new_certificate_is_for_later_connections_and_a_pair_that_does_not_fit_is_left_out(tmp_path):
    pairs = [certificate(tmp_path, "old"), certificate(tmp_path, "new"), certificate(tmp_path, "rsa", "rsa:2048")]
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"

    def put(key_data, cert_data):
        key.write_bytes(key_data)
        cert.write_bytes(cert_data)

    put(*pairs[0])
    config = uvicorn.Config(None, ssl_keyfile=str(key), ssl_certfile=str(cert), log_config=None)
    config.load()
    server = DrainingServer(config, None, 1.0)
    server._loop = SimpleNamespace(call_soon_threadsafe=lambda switch: switch())
    old = shown_certificate(config.ssl)
    put(pairs[1][0], pairs[0][1])
    with pytest.raises(ssl.SSLError):
        server._load_certificate()
    assert shown_certificate(config.ssl) == old
    put(*pairs[1])
    server._load_certificate()
    assert shown_certificate(config.ssl) == pairs[1][1].decode().split() != old
    put(*pairs[2])  # another type of key: a client that accepts both types must not get the old certificate
    server._load_certificate()
    assert shown_certificate(config.ssl) == pairs[2][1].decode().split()
