"""Pictures at addresses are read only where the options allow, only from public hosts, and within bytes and seconds."""

import contextlib
import http.server
import os
import threading
import time

import pytest

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError, PromptError
from llamabatch.media import sources
from llamabatch.media.sources import MediaSources, is_public

BODY = b"picture" * 1000
MOST = 2**20


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.split("?")[0]
        if name == "/a.png":
            self._send(200, BODY)
        elif name == "/large":
            self._send(200, bytes(MOST + 2))
        elif name == "/slow":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"a")
                    self.wfile.flush()
                    time.sleep(0.02)
        elif name == "/slow-header":
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
                while True:
                    self.wfile.write(b"a")
                    self.wfile.flush()
                    time.sleep(0.02)
        elif name == "/cut":
            self.send_response(200)
            self.send_header("content-length", "100")
            self.end_headers()
            self.wfile.write(b"abc")
            self.close_connection = True
        elif name.startswith("/to/"):
            self._send(302, b"", location=self.path[len("/to/") :])
        else:
            self._send(404, b"")

    def _send(self, status, body, **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def port():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture
def here(monkeypatch, port):
    """Returns the address of the server, with a name of the allowed domains. This machine counts as a public host."""
    look_up = sources.socket.getaddrinfo

    def found(host, *args, **options):
        return look_up("127.0.0.1" if host.endswith(".example") else host, *args, **options)

    monkeypatch.setattr(sources.socket, "getaddrinfo", found)
    monkeypatch.setattr(sources, "is_public", lambda address: address == "127.0.0.1" or is_public(address))
    return f"http://pictures.example:{port}"


ALLOWED = MediaSources(domains=("pictures.example",))


def test_an_address_of_an_allowed_host_is_fetched_also_where_it_moves(here):
    assert ALLOWED.read(f"{here}/a.png?x=1#y", MOST) == BODY
    assert ALLOWED.read(f"{here.upper().replace('HTTP', 'http')}/a.png", MOST) == BODY
    assert ALLOWED.read(f"{here}/to//a.png", MOST) == BODY
    assert ALLOWED.read(f"{here}/to/{here}/to//a.png", MOST) == BODY
    assert MediaSources(domains=("*",)).read(f"{here}/a.png", MOST) == BODY
    assert len(ALLOWED.read(f"{here}/large", MOST)) > MOST  # the caller refuses the large answer


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/missing", "the server answers 404"),
        ("/miss ing/é", "the server answers 404"),
        ("/cut", "the answer ends 97 bytes early"),
        ("/to/http://elsewhere.example/a.png", "'elsewhere.example' is none of the hosts in allowed_media_domains"),
        ("/to/ftp://pictures.example/a.png", "no address of http or https"),
        ("/to/file:///etc/passwd", "no address of http or https"),
        ("/to/http://[", "cannot be fetched"),
        ("/to//to//to//to//to//to//a.png", "more than 5 addresses in a row"),
    ],
)
def test_what_is_refused_of_an_allowed_host(here, path, message):
    with pytest.raises(PromptError, match=message):
        ALLOWED.read(here + path, MOST)


@pytest.mark.parametrize("path", ["/slow", "/slow-header"])
def test_an_answer_that_trickles_ends_in_time(here, path, monkeypatch):
    monkeypatch.setattr(sources, "FETCH_S", 0.3)
    with pytest.raises(PromptError, match=r"the addresses of a prompt may take 0\.3 s"):
        ALLOWED.read(here + path, MOST)


def test_only_public_addresses_are_connected_to(monkeypatch, port):
    with pytest.raises(PromptError, match="has an address that is not public"):
        MediaSources(domains=("*",)).read(f"http://127.0.0.1:{port}/a.png", MOST)
    with pytest.raises(PromptError, match="has an address that is not public"):
        MediaSources(domains=("localhost",)).read(f"http://localhost:{port}/a.png", MOST)
    with pytest.raises(PromptError, match=r"only from hosts in allowed_media_domains: a\.b is none"):
        MediaSources(folder="/").read("http://user:secret@a.b/x?key=1", MOST)
    inner = ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1"]
    inner += ["255.255.255.255", "::1", "fe80::1%eth0", "fc00::1", "::ffff:10.0.0.1", "64:ff9b::7f00:1"]
    inner += ["2002:7f00:1::", "ff02::1", "::", "fec0::1", "192.0.0.192", "168.63.129.16", "3fff::1"]
    assert [address for address in inner if is_public(address)] == []
    assert all(map(is_public, ["1.1.1.1", "2606:4700:4700::1111", "64:ff9b::101:101", "::ffff:8.8.8.8"]))


def test_files_below_the_folder_alone(tmp_path):
    folder = tmp_path / "my pictures"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "b c.png").write_bytes(BODY)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(folder / "pipe.png")
    found = MediaSources(folder=str(folder))
    assert found.read((folder / "a" / "b c.png").as_uri(), MOST) == BODY
    for form in ("file://a/b%20c.png", "file:////a//b%20c.png", "file:///a/b%20c.png"):  # llama-server's
        assert found.read(form, MOST) == BODY
    for address in (
        (tmp_path / "secret.png").as_uri(),
        "file://../secret.png",
        "file://link.png",
        "file:///etc/passwd",
    ):
        with pytest.raises(PromptError, match="is not below allowed_local_media_path"):
            found.read(address, MOST)
    for address in ("file://missing.png", "file://pipe.png", "file://a", "file://in.png%00", "file:///%00"):
        with pytest.raises(PromptError, match=r"cannot be read: (No such file|.*null)"):
            found.read(address, MOST)
    with pytest.raises(PromptError, match="files are read only below allowed_local_media_path"):
        MediaSources(domains=("*",)).read("file:///etc/passwd", MOST)


def test_the_options(tmp_path):
    config = EngineConfig("tiny", allowed_local_media_path=tmp_path, allowed_media_domains="Example.org, a.b.")
    assert (config.allowed_local_media_path, config.allowed_media_domains) == (str(tmp_path), ("example.org", "a.b"))
    with pytest.raises(ConfigError, match="which is no folder"):
        EngineConfig("tiny", allowed_local_media_path=tmp_path / "missing")
    with pytest.raises(ConfigError, match="give at most 256 names of hosts"):
        EngineConfig("tiny", allowed_media_domains=["https://example.org/"])
