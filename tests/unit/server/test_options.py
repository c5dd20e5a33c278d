"""Options of the server: a refusal names value and range, and keys are never shown."""

import pytest

from llamabatch.errors import ConfigError, SamplingError, UnknownOptionError
from llamabatch.server.options import ServerOptions, read_keys, split
from llamabatch.server.run import check_tls, listen


def test_defaults_are_those_of_this_machine_alone():
    options = ServerOptions()
    assert options.addresses == ("127.0.0.1",)
    assert options.beyond_loopback == ()
    options.check_exposure()
    assert options.cors_origins == ("localhost",)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"port": 65536}, "port is 65536; give a whole number from 0 to 65535"),
        ({"port": "8080"}, "port is '8080'"),
        ({"host": ""}, "host is ''"),
        ({"host": " , "}, "host is"),
        ({"host": "0.0.0.0,127.0.0.1", "port": 0, "no_key": True}, "port is 0, but host names several"),
        ({"uds": "/" + "x" * 120}, "more than 107 bytes"),
        ({"strict": 1}, "strict is 1; give True or False"),
        ({"max_body_bytes": 5}, "max_body_bytes is 5; give a whole number from 1024"),
        ({"max_bodies_bytes": 2048}, "max_bodies_bytes is 2048; it must be at least max_body_bytes"),
        ({"header_timeout_s": 0}, "header_timeout_s is 0; it must lie from 0.05"),
        ({"drain_s": float("nan")}, "drain_s is nan"),
        ({"root_path": "llm"}, "root_path is 'llm'; give a path such as /llm"),
        ({"allowed_hosts": "a b"}, "allowed_hosts holds 'a b'"),
        ({"allowed_hosts": "example.com:80"}, "without a port"),
        ({"cors_origins": "example.com"}, "cors_origins holds 'example.com'"),
        ({"cors_origins": "*", "cors_credentials": True}, "cors_credentials is on, but cors_origins has *"),
        ({"cors_methods": "GET POST"}, "cors_methods holds 'GET POST'"),
        ({"ssl_keyfile": "key.pem"}, "ssl_certfile is not given; TLS needs both"),
        ({"ssl_certfile": "cert.pem"}, "ssl_keyfile is not given; TLS needs both"),
        ({"ssl_ca_certs": "ca.pem"}, "needs ssl_certfile"),
        ({"log_level": "loud"}, "log_level is 'loud'"),
        ({"served_model_names": [3]}, "served_model_names is [3]"),
        ({"default_adapters": 3}, "default_adapters is 3"),
    ],
)
def test_a_refused_value_is_named(given, told):
    with pytest.raises(ConfigError, match=r".") as caught:
        ServerOptions(**given)
    assert told in str(caught.value)


def test_values_for_requests_are_checked_at_once():
    assert ServerOptions(sampling={"temp": 0.2}).sampling == {"temp": 0.2}
    with pytest.raises(SamplingError, match="top_p"):
        ServerOptions(sampling={"top_p": 3})
    with pytest.raises(SamplingError, match="tmp"):
        ServerOptions(sampling={"tmp": 1})


def test_keys_of_options_and_file_join(tmp_path):
    file = tmp_path / "keys"
    file.write_text("\ufeff# ours\nfirst\n\n  second  \nthird\n", encoding="utf-8")
    options = ServerOptions(api_keys="third, fourth", api_key_file=file)
    assert options.api_keys == ("third", "fourth", "first", "second")
    assert "fourth" not in repr(options)


@pytest.mark.parametrize("key", ["sëcret-of-mine", "two words", "x" * 5000, "tab\there"])
def test_a_key_that_cannot_be_sent_is_refused_unshown(key):
    with pytest.raises(ConfigError, match=r".") as caught:
        ServerOptions(api_keys=[key])
    assert key[:6] not in str(caught.value)


def test_a_key_file_without_keys(tmp_path):
    (tmp_path / "keys").write_text("# none\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        ServerOptions(api_key_file=tmp_path / "missing")


def test_a_key_file_below_the_working_folder_is_named_as_it_was_given(tmp_path, monkeypatch):
    folder = tmp_path / ("a folder with a long name, " * 3)
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"api_key_file 'keys\.txt' cannot be read: No such file"):
        ServerOptions(api_key_file="keys.txt")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="no text in UTF-8"):
        read_keys(str(tmp_path / "bytes"))


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "127.0.0.1.example.com", "localhost.example.com", "127.0.0.1,10.0.0.1"]
)
def test_beyond_loopback_needs_a_key_or_a_word(host):
    with pytest.raises(ConfigError, match=r"--api-key.*--no-key"):
        ServerOptions(host=host).check_exposure()
    ServerOptions(host=host, api_keys=["k"]).check_exposure()
    ServerOptions(host=host, no_key=True).check_exposure()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "[::1]", "localhost", "app.localhost", "llm.sock"])
def test_loopback_and_sockets_need_none(host):
    ServerOptions(host=host).check_exposure()


def test_a_unix_socket_goes_before_host(tmp_path):
    options = ServerOptions(uds=tmp_path / "llm", host="0.0.0.0")
    assert options.sockets == (str(tmp_path / "llm"),)
    assert options.addresses == ()
    assert ServerOptions(host="127.0.0.1,/run/a.sock").sockets == ("/run/a.sock",)


def test_credentials_are_for_named_origins_alone():
    assert ServerOptions(cors_origins="https://App.example.com/").cors_origins == ("https://app.example.com",)
    assert ServerOptions(cors_origins="https://a.example").cors_credentials
    assert not ServerOptions(cors_origins="*").cors_credentials


def test_options_of_server_and_engine_are_told_apart():
    server, engine = split({"port": 1, "n_ctx": 64}, engine=("n_ctx",))
    assert (server.port, engine) == (1, {"n_ctx": 64})
    with pytest.raises(UnknownOptionError, match="did you mean 'port'"):
        split({"prot": 1}, engine=("n_ctx",))


def test_a_file_in_the_place_of_a_socket_stays(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    (tmp_path / "link.sock").symlink_to(path)
    for name in ("model.gguf", "link.sock"):
        with pytest.raises(ConfigError, match="which is no socket"):
            listen(ServerOptions(uds=tmp_path / name))
    assert path.read_bytes() == b"GGUF"


def test_files_of_tls_that_cannot_be_used_are_named(tmp_path):
    junk, missing = tmp_path / "junk.pem", tmp_path / "missing.pem"
    junk.write_text("junk")
    check_tls(ServerOptions())
    for key, certificate, says in (
        (missing, junk, r"ssl_keyfile '.*missing.pem' cannot be read: No such file"),
        (junk, missing, r"ssl_certfile '.*missing.pem' cannot be read"),
        (junk, tmp_path, "ssl_certfile .* cannot be read"),
        (junk, junk, r"ssl_certfile '.*junk.pem' and ssl_keyfile '.*junk.pem' cannot be used"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_tls(ServerOptions(ssl_keyfile=str(key), ssl_certfile=str(certificate)))
