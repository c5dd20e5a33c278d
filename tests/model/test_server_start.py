"""`llamabatch serve` as a program: TLS, a UNIX socket, its end, and a log without prompts."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys

import httpx
import pytest

from tests.waiting import PATIENCE_S, until

PROMPT = "zebra quagga okapi"


@contextlib.contextmanager
def served(folder, *arguments, **environment):
    """Starts a server of the bundled model in a process of its own. Yields its URL and its process."""
    command = [sys.executable, "-m", "llamabatch", "serve", "-m", "tiny", "--n-slots", "2", "--port", "0", *arguments]
    log = folder / "stderr"
    with open(log, "wb") as stderr:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
        process = subprocess.Popen(command, stdout=stderr, stderr=stderr, env=env, cwd=folder)
    try:
        yield _url(process, log), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(30)


def _url(process, log):
    def told():
        text = log.read_text(encoding="utf-8")
        assert process.poll() is None, text
        return text.partition("is served at ")[2]

    return until(told, log.read_text).split(": ")[0]


def ready(client):
    until(lambda: client.get("/readyz").status_code == 200)
    return client


def certificate(folder, name):
    """Makes a self-signed certificate. Returns the paths of its key and the certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", str(key),
         "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, cert


def test_tls_and_certificates_of_clients(tmp_path):
    key, cert = certificate(tmp_path, "server")
    client_key, client_cert = certificate(tmp_path, "client")
    with served(
        tmp_path, "--ssl-key-file", str(key), "--ssl-cert-file", str(cert), "--ssl-ca-certs", str(client_cert)
    ) as (url, _):
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(cert))
        with (
            pytest.raises((httpx.HTTPError, ssl.SSLError)),
            httpx.Client(base_url=url, timeout=60, verify=context) as client,
        ):
            client.get("/livez")  # the client has no certificate
        context.load_cert_chain(str(client_cert), str(client_key))
        with httpx.Client(base_url=url, timeout=60, verify=context) as client:
            assert ready(client).get("/livez").status_code == 200
            reply = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
            assert reply.status_code == 200
            _leave_over_tls(url, context, client)
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain:
            plain.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" not in plain.recv(100)
    assert "Traceback" not in (tmp_path / "stderr").read_text()


def _leave_over_tls(url, context, client):
    """Leaves during a request, which must then end. A TLS connection cannot be half closed."""
    body = json.dumps({"prompt": "Once", "max_tokens": 900, "n": 64, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=PATIENCE_S) as plain:
        secure = context.wrap_socket(plain, server_hostname="localhost")
        secure.sendall(head.encode() + body)
        until(lambda: "requests_processing 2" in client.get("/metrics").text)
        with contextlib.suppress(OSError):  # the server may close first
            secure.unwrap()
        secure.close()
    until(lambda: "requests_processing 0" in client.get("/metrics").text)
    [tokens] = re.findall(r"^llamacpp:tokens_predicted_total (\S+)", client.get("/metrics").text, re.MULTILINE)
    assert float(tokens) < 64 * 900


@pytest.mark.skipif(sys.platform == "win32", reason="UNIX sockets")
def test_a_unix_socket_needs_no_key_and_is_removed(tmp_path):
    path = tmp_path / "llm.sock"
    with served(tmp_path, "--host", str(path)) as (url, process):
        assert str(path) in url
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.example", timeout=60
        ) as client:
            assert ready(client).get("/v1/models").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not path.exists()


def test_no_prompt_no_answer_and_no_key_is_in_the_log(tmp_path):
    key, looks = "sk-of-mine-alone", []
    with (
        served(tmp_path, "--log-level", "debug", "--access-log", "--api-key", key, "--max-body-bytes", "4096") as (
            url,
            _,
        ),
        httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {key}"}) as client,
    ):
        until(lambda: looks.append(client.get("/readyz").status_code) or looks[-1] == 200)
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
        answer = client.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        ).json()
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", chat | {"stream": True}),
            ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "zebra_quagga": PROMPT}),
            ("/v1/completions", {"prompt": PROMPT, "temperature": PROMPT}),
            ("/v1/completions", {"prompt": PROMPT * 200}),
            ("/v1/completions", {"prompt": PROMPT, "stop": [PROMPT], "response_format": {"type": PROMPT}}),
            ("/v1/embeddings", {"input": PROMPT}),
            ("/tokenize", {"content": PROMPT}),
            ("/v1/rerank", {"query": PROMPT, "documents": [PROMPT]}),
            (f"/nothing?prompt={PROMPT.replace(' ', '+')}", {}),
        ):
            client.post(path, json=body)
        client.post("/v1/completions", content=f'{{"prompt": "{PROMPT}'.encode())
        client.post("/v1/completions", json={"prompt": PROMPT}, headers={"Authorization": "Bearer wrong-zebra"})
    log = (tmp_path / "stderr").read_text(encoding="utf-8")
    assert 0 < log.index("is being loaded") < log.index("ready after ") < log.index("POST /v1/chat/completions 200")
    assert log.count("GET /readyz: 503: model_loading") == looks.count(503)  # at level debug
    assert "INFO llamabatch.server.http.request_log: request" not in log.partition("ready after ")[0]
    assert "POST /nothing 404" in log
    for secret in ("quagga okapi", "zebra+quagga", key, "wrong-zebra"):
        assert secret not in log
    text = answer["choices"][0]["text"]
    assert len(text) > 3
    assert text not in log


def test_a_port_in_use_is_a_2_with_a_clear_message(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "llamabatch", "serve", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert f"port {port} of 127.0.0.1 cannot be listened on" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
def test_too_little_memory_is_a_1_with_the_sum_before_the_load(tmp_path):
    command = [sys.executable, "-m", "llamabatch", "serve", "--port", "0", "--n-slots", "256", "--n-ctx", "2048"]
    script = (
        "import resource, sys, os; resource.setrlimit(resource.RLIMIT_DATA, (700 * 2**20,) * 2); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command, "--type-k", "f32", "--kv", "split"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "KV cache" in done.stderr
    assert "is served at" not in done.stderr
    assert "Traceback" not in done.stderr
