"""Models at addresses, from a server on this machine: whole, in parts, interrupted, damaged, changed, private."""

import base64
import hashlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from llamabatch.errors import ModelFileError
from llamabatch.gguf import download as module
from llamabatch.gguf.download import download
from llamabatch.gguf.model_cache import cached_models, remove
from llamabatch.gguf.resolve import resolve
from llamabatch.utils.network import reachable
from tests.waiting import PATIENCE_S

DATA = b"GGUF\3\0\0\0" + bytes(16) + bytes(range(256)) * 12_000
TOKEN = "hf_" + "secret" * 4


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/m.gguf": DATA}
        self.etags = {}
        self.extra = {}
        self.asked = []
        self.break_after = None  # bytes of an answer, after which the connection ends
        self.code = None
        self.redirect = {}

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        server, path = self.server, self.path.partition("?")[0]
        server.asked.append((self.path, dict(self.headers)))
        if server.code or (path not in server.files and path not in server.redirect):
            return self.send_error(server.code or 404)
        if path in server.redirect:
            self.send_response(302)
            self.send_header("Location", server.redirect[path])
            for name, value in server.extra.items():
                self.send_header(name, value)
            return self.end_headers()
        data, etag = server.files[path], server.etags.get(path)
        if etag and self.headers.get("If-None-Match") == etag:
            self.send_response(304)
            return self.end_headers()
        start = 0
        if "Range" in self.headers and self.headers.get("If-Range") == etag:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        if etag:
            self.send_header("ETag", etag)
        for name, value in server.extra.items():
            self.send_header(name, value)
        self.end_headers()
        stop = len(data) if server.break_after is None else start + server.break_after
        self.wfile.write(data[start:stop])
        return None


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_TOKEN_PATH", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("llamabatch.utils.paths.cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr("llamabatch.gguf.model_cache.cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(module, "reachable", lambda url: reachable(url, PATIENCE_S))
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ranges(server):
    return [headers.get("Range") for _, headers in server.asked]


def test_a_file_is_fetched_once_and_listed_and_removed(server):
    server.etags["/m.gguf"] = '"v1"'
    path = download(f"{server.url}/m.gguf")
    assert path.name == "m.gguf"
    assert path.read_bytes() == DATA
    assert resolve(f"{server.url}/m.gguf") == path
    assert server.asked[-1][1]["If-None-Match"] == '"v1"'
    assert {file.name for file in path.parent.iterdir()} == {"m.gguf", "m.gguf.json", ".lock"}
    [model] = cached_models()
    assert (model.name, model.n_bytes, model.path) == (f"{server.url}/m.gguf", len(DATA), path)
    remove(model)
    assert cached_models() == []
    assert not path.exists()


@pytest.mark.parametrize("etag", ['"v1"', None])
def test_another_version_on_the_server_replaces_ours(server, etag):
    server.etags["/m.gguf"] = etag
    path = download(f"{server.url}/m.gguf")
    server.files["/m.gguf"] = DATA + b"new"
    server.etags["/m.gguf"] = etag and '"v2"'
    assert download(f"{server.url}/m.gguf") == path
    assert path.read_bytes() == DATA + b"new"


def test_an_interrupted_download_goes_on_where_it_ended(server):
    server.etags["/m.gguf"], server.break_after = '"v1"', 1_000_000
    path = download(f"{server.url}/m.gguf")  # four connections; all but the last one break
    assert path.read_bytes() == DATA
    assert ranges(server) == [None, *(f"bytes={n}000000-" for n in (1, 2, 3))]


def test_the_next_call_goes_on_after_the_server_has_gone(server, monkeypatch):
    server.etags["/m.gguf"], server.break_after = '"v1"', 500_000
    answers = iter([True, False])
    monkeypatch.setattr(module, "reachable", lambda url: next(answers))
    with pytest.raises(ModelFileError, match=r"cannot be fetched: .* continues after the .* bytes that it has"):
        download(f"{server.url}/m.gguf")
    assert cached_models() == []
    monkeypatch.setattr(module, "reachable", lambda url: True)
    server.break_after = None
    server.extra["X-Linked-Etag"] = f'"{hashlib.sha256(DATA).hexdigest()}"'  # includes the first call's bytes
    assert download(f"{server.url}/m.gguf").read_bytes() == DATA
    assert ranges(server)[-1] == "bytes=500000-"


def test_a_file_that_has_changed_begins_anew(server, monkeypatch):
    server.etags["/m.gguf"], server.break_after = '"v1"', 500_000
    answers = iter([True, False])
    monkeypatch.setattr(module, "reachable", lambda url: next(answers, True))
    with pytest.raises(ModelFileError, match="cannot be fetched"):
        download(f"{server.url}/m.gguf")
    server.files["/m.gguf"], server.etags["/m.gguf"], server.break_after = DATA[::-1] * 0 + b"GGUF2", '"v2"', None
    assert download(f"{server.url}/m.gguf").read_bytes() == b"GGUF2"


def test_a_connection_that_never_gives_a_byte_ends(server):
    server.break_after = 0
    with pytest.raises(ModelFileError, match="cannot be fetched: the connection ended after 0 of"):
        download(f"{server.url}/m.gguf")
    assert len(server.asked) == module.MOST_TRIES


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Linked-Etag", '"{hex}"'), ("ETag", '"{hex}"'), ("Repr-Digest", "sha-256=:{base}:"),
        ("Digest", "sha-256={base}"), ("Repr-Digest", "md5=:xx:, sha-256=:{base}:"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("right", [True, False])
def test_a_digest_of_the_server_is_held_against_the_file(server, name, value, right):
    digest = hashlib.sha256(DATA if right else b"another file")
    server.extra[name] = value.format(hex=digest.hexdigest(), base=base64.b64encode(digest.digest()).decode())
    if right:
        assert download(f"{server.url}/m.gguf").read_bytes() == DATA
        return
    with pytest.raises(ModelFileError, match=r"m\.gguf arrived damaged: its sha256 is .*, but the server says"):
        download(f"{server.url}/m.gguf")
    assert cached_models() == []


def test_what_a_redirect_says_of_the_file_counts_and_its_secrets_stay(server, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"http://localhost:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.redirect["/o/r/resolve/main/m.gguf"] = f"{server.url}/m.gguf?signature=abc"
    server.extra["X-Linked-Size"] = str(len(DATA) + 1)
    with pytest.raises(ModelFileError, match=f"ended after {len(DATA):,} of {len(DATA) + 1:,} bytes"):
        download(f"http://localhost:{server.server_port}/o/r/blob/main/m.gguf")
    (first, own), (second, elsewhere) = server.asked[:2]
    assert (first, own["Authorization"]) == ("/o/r/resolve/main/m.gguf", f"Bearer {TOKEN}")
    assert second == "/m.gguf?signature=abc"
    assert "Authorization" not in elsewhere


@pytest.mark.parametrize("code", [401, 403, 404, 500])
def test_refusals_and_no_secret_in_a_message(server, monkeypatch, code, caplog):
    monkeypatch.setenv("HF_ENDPOINT", f"http://localhost:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.code = code
    caplog.set_level("DEBUG")
    with pytest.raises(ModelFileError, match=f"cannot be fetched: the server says {code}") as refusal:
        download(f"http://localhost:{server.server_port}/o/r/resolve/main/m.gguf?key=hidden")
    assert ("set HF_TOKEN to a token" in str(refusal.value)) == (code in (401, 403))
    assert not any(secret in f"{refusal.value}{caplog.text}" for secret in (TOKEN, "hidden"))


def test_a_user_and_a_password_reach_the_server_and_nothing_else(server):
    path = download(f"http://me:hidden@127.0.0.1:{server.server_port}/m.gguf?key=hidden")
    assert server.asked[0][1]["Authorization"] == "Basic " + base64.b64encode(b"me:hidden").decode()
    assert not any("hidden" in file.read_text() for file in path.parent.glob("*.json"))
    assert cached_models()[0].name == f"{server.url}/m.gguf"


def test_no_token_goes_to_another_host_or_over_http(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    download(f"{server.url}/m.gguf")
    assert "Authorization" not in server.asked[0][1]
    assert module._token("huggingface.co", "http") is None
    assert module._token("huggingface.co", "https") == TOKEN
    assert module._token("huggingface.co.example.com", "https") is None
    assert module._token("evilhuggingface.co", "https") is None


def test_all_parts_are_fetched(server):
    for n in (1, 2):
        server.files[f"/d/m-0000{n}-of-00002.gguf"] = b"GGUF" + bytes([n])
    path = download(f"{server.url}/d/m-00002-of-00002.gguf")
    assert path.name == "m-00001-of-00002.gguf"
    assert path.with_name("m-00002-of-00002.gguf").read_bytes() == b"GGUF\x02"
    [model] = cached_models()
    assert (len(model.files), model.n_bytes) == (2, 10)


def test_what_is_no_model_is_refused_before_it_is_kept(server):
    server.files["/m.gguf"] = b"<html>Sign in</html>"
    with pytest.raises(ModelFileError, match=r"is not a GGUF file: it begins with b'<html>"):
        download(f"{server.url}/m.gguf")
    for bad in (
        f"{server.url}/m.bin",
        f"{server.url}/",
        "https://",
        "http://[x.gguf",
        f"{server.url}/a b.gguf",
        "https://x/\ud800.gguf",
    ):
        with pytest.raises(ModelFileError, match=r"is no address of a model; give that of a \.gguf file"):
            download(bad)


def test_a_full_disk_is_known_before_the_download(server, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(ModelFileError, match=r"needs 0.0 GB more in .*LLAMABATCH_CACHE"):
        download(f"{server.url}/m.gguf")


def test_without_the_server_the_copy_is_used_and_else_the_message_is_quick(server, monkeypatch):
    path = download(f"{server.url}/m.gguf")
    server.code = 403  # for example, the signature of an address has expired
    assert download(f"{server.url}/m.gguf") == path
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(ModelFileError, match=r"cannot be fetched: 127\.0\.0\.1 is out of reach$"):
        download(f"http://127.0.0.1:{port}/m.gguf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(server.asked)
    assert download(f"{server.url}/m.gguf") == path
    with pytest.raises(ModelFileError, match="is not in the cache, and HF_HUB_OFFLINE is set"):
        download(f"{server.url}/other.gguf")
    assert len(server.asked) == asked


def test_two_that_want_it_fetch_it_once(server):
    server.etags["/m.gguf"] = '"v1"'
    found = []
    threads = [threading.Thread(target=lambda: found.append(download(f"{server.url}/m.gguf"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert sum("If-None-Match" not in headers for _, headers in server.asked) == 1


def test_a_folder_names_the_models_in_it(tmp_path):
    for number in range(7):
        (tmp_path / f"m{number}.gguf").touch()
    with pytest.raises(ModelFileError, match=r"is a directory with 'm0.gguf', .*'m4.gguf', …; give the path"):
        resolve(str(tmp_path))
