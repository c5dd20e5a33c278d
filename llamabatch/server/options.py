"""Options of the server: address, keys, hosts, CORS, limits, and defaults for requests.

ServerOptions is frozen, and its values are checked once. An error names each unknown option. EngineConfig has the
options of the engine. `split` separates the two groups. The options of the command line are generated from the fields
of ServerOptions.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

from llamabatch.chat.conversation import check_template
from llamabatch.chat.options import template_source
from llamabatch.errors import ConfigError, UnknownOptionError
from llamabatch.request.adapters import adapter_set
from llamabatch.request.sampling_params import MAX_LOGPROBS, SamplingParams
from llamabatch.utils.checks import boolean, integer, items, mapping, nearest, number, show, string
from llamabatch.utils.paths import absolute, shown

LOOPBACK = "127.0.0.1"
LOG_LEVELS = ("error", "warning", "info", "debug")
CORS_METHODS = ("GET", "POST", "DELETE", "OPTIONS")
ANY, LOCALHOST = "*", "localhost"  # special values of cors_origins and allowed_hosts
_MOST_NAMES = 1000
_MOST_KEYS = 10_000
_LONGEST_KEY = 4096
_LONGEST_SOCKET = 107  # in bytes: the size of sun_path on Linux without the final NUL
_LARGEST_KEY_FILE = 2**20  # bytes
_KEY = re.compile(r"[\x21-\x7e]+")  # valid characters of an HTTP header, without blanks
_KEY_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_MOST_A_MINUTE = 10**9
_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?", re.IGNORECASE)
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^\s/?#@,]+", re.IGNORECASE)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a method, or the name of a header (RFC 9110, 5.6.2)
_BOOLEANS = (
    *("no_key", "metrics_without_key", "strict", "trust_request_chat_template", "slots", "props", "page", "batches"),
    *("access_log", "reuse_port", "any_model"),
)
_INTEGERS = (
    ("max_logprobs", -1, MAX_LOGPROBS),
    ("port", 0, 65535),
    ("max_body_bytes", 1024, 2**40),
    ("max_bodies_bytes", 1024, 2**45),
    ("max_responses_bytes", 0, 2**45),
    ("max_header_bytes", 1024, 2**24),
    ("max_headers", 8, 10_000),
    ("max_connections", 1, 2**20),
    ("max_disk_bytes", 0, 2**60),
    ("max_file_bytes", 1024, 2**45),
    ("threads", 1, 512),
)
_SECONDS = (  # (name, minimum, maximum)
    ("header_timeout_s", 0.05, 86_400),
    ("body_timeout_s", 0.05, 86_400),
    ("keep_alive_s", 0, 86_400),
    ("write_timeout_s", 0.05, 86_400),
    ("drain_s", 0, 86_400),
    ("sse_ping_s", 0, 86_400),
)
_PATHS = (
    *("uds", "api_key_file", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "lora_dir", "slot_save_path", "data_dir"),
    "log_file",
)
_TEXTS = ("host", "root_path", *_PATHS)


def _option(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help}, **more)


class ApiKey(NamedTuple):
    """A key of the server.

    Attributes:
        key: the secret, sent with a request.
        name: the name of the key in logs and metrics.
        rpm: POST requests allowed in a minute; None: any number.
        tpm: tokens of prompts and outputs allowed in a minute; None: any number.
    """

    key: str
    name: str
    rpm: int | None = None
    tpm: int | None = None

    def __repr__(self) -> str:
        return f"ApiKey({self.name})"


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server, without the options of the engine. Raises ConfigError.

    The constructor makes paths absolute, and adds the keys in `api_key_file` to `api_keys`.

    Attributes: see the help text of each field, which `llamabatch serve --help` prints.
    """

    host: str = _option(LOOPBACK, "addresses to listen on, with commas between them, or a UNIX socket ending in .sock")
    port: int = _option(8080, "port to listen on; 0: any free one")
    uds: str | None = _option(None, "UNIX socket to listen on, in place of host and port")
    reuse_port: bool = _option(False, "let several servers listen on one port; the system spreads connections")
    root_path: str = _option("", "prefix of all paths of the server, as /llm")
    api_keys: tuple[str, ...] = _option(
        (),
        "accepted keys, as KEY1,KEY2; a key may have a name and limits a minute, as 'KEY1 name=ada rpm=60 tpm=100000'",
        repr=False,
    )
    api_key_file: str | None = _option(
        None, "file with a key a line, which is read again when it changes; lines that begin with # are comments"
    )
    no_key: bool = _option(False, "serve beyond this machine without a key; any caller may then use the model")
    metrics_without_key: bool = _option(False, "answer /metrics without a key")
    allowed_hosts: tuple[str, ...] = _option(
        (), "names that the header Host may have beside those of this machine, as llm.example.com; *: any"
    )
    cors_origins: tuple[str, ...] = _option(
        (LOCALHOST,), "origins whose pages may read answers, as https://app.example.com; localhost: pages of this "
        "machine; *: any, without credentials"
    )  # fmt: skip
    cors_methods: tuple[str, ...] = _option(CORS_METHODS, "methods that these pages may use")
    cors_headers: tuple[str, ...] = _option((ANY,), "headers that these pages may send; *: any")
    cors_credentials: bool | None = _option(
        None, "let these pages send credentials (not given: if origins are named, without *)"
    )
    ssl_keyfile: str | None = _option(None, "private key for TLS, a PEM file")
    ssl_certfile: str | None = _option(None, "certificate for TLS, a PEM file, with its chain")
    ssl_ca_certs: str | None = _option(None, "authorities of clients' certificates, a PEM file; clients must have one")
    max_body_bytes: int = _option(32 * 2**20, "bytes in the body of a request at most")
    max_bodies_bytes: int = _option(64 * 2**20, "bytes in all bodies that are being received, at most")
    max_responses_bytes: int = _option(
        32 * 2**20, "bytes of memory for the last responses of /v1/responses, from which a next one goes on; 0: none"
    )
    max_logprobs: int = _option(20, "logprobs at each place that a request may ask for; -1: all that the engine gives")
    max_header_bytes: int = _option(64 * 2**10, "bytes in the line and headers of a request at most")
    max_headers: int = _option(128, "headers of a request at most")
    max_connections: int = _option(4096, "connections at once at most; further ones are closed at once")
    header_timeout_s: float = _option(10.0, "seconds for a client to send the headers of a request")
    body_timeout_s: float = _option(
        60.0, "seconds for a client to send the body of a request, and one more for each 16 KiB"
    )
    keep_alive_s: float = _option(75.0, "seconds that an idle connection stays open; 0: it is closed at once")
    write_timeout_s: float = _option(60.0, "seconds for a client to take what it was sent before its request ends")
    drain_s: float = _option(30.0, "seconds for running requests to end after SIGTERM; then the others are aborted")
    sse_ping_s: float = _option(15.0, "seconds without an event after which a stream sends a comment; 0: never")
    served_model_names: tuple[str, ...] = _option(
        (),
        "names of the model, as a,b; answers have the first (not given: the file's; any is accepted)",
    )
    any_model: bool = _option(False, "serve requests for any other model, too, where names are given")
    strict: bool = _option(
        False, "refuse requests with unknown or unsupported optional fields, which are ignored otherwise"
    )
    sampling: Mapping[str, Any] = _option(None, "default values of SamplingParams for requests")  # None becomes {}
    chat_template: str | None = _option(None, "a file with a jinja2 template, or its text, in place of the model's")
    chat_template_kwargs: Mapping[str, Any] = _option(None, "values for the chat template; a request's go first")
    enable_thinking: bool | None = _option(
        None, "thinking of chat templates that read enable_thinking (not given: as the template has it)"
    )
    trust_request_chat_template: bool = _option(False, "let requests bring a chat template of their own")
    default_adapters: Mapping[str, float] = _option(
        None, "names and scales of adapters for requests that name none; the engine has loaded them"
    )
    lora_dir: str | None = _option(None, "folder from which requests may load adapters (not given: none)")
    slot_save_path: str | None = _option(
        None, "folder for /slots/N?action=save and restore (not given: no actions on slots)"
    )
    slots: bool = _option(True, "answer /slots, which shows lengths and progress, never a prompt")
    props: bool = _option(False, "let POST /props change the defaults of requests")
    page: bool = _option(True, "serve the page at /")
    batches: bool = _option(True, "answer /v1/files and /v1/batches")
    data_dir: str | None = _option(
        None, "folder of files and batches, for one server only (not given: a folder for each model in your home)"
    )
    max_disk_bytes: int = _option(10 * 2**30, "bytes that files and batches take in that folder at most")
    max_file_bytes: int = _option(512 * 2**20, "bytes of an uploaded file at most")
    threads: int = _option(4, "threads that turn requests into tokens")
    log_level: str = _option("info", f"least level of the log: {', '.join(LOG_LEVELS)}")
    log_file: str | None = _option(None, "file that the log is appended to (not given: stderr)")
    access_log: bool = _option(False, "log a line for each request: client, method, path, status, seconds")

    _given: ClassVar[tuple[str, ...]] = ()  # api_keys without the keys of api_key_file

    def __post_init__(self) -> None:
        for name in _BOOLEANS:
            self._keep(name, boolean(ConfigError, name, getattr(self, name)))
        for name, low, high in _INTEGERS:
            self._keep(name, integer(ConfigError, name, getattr(self, name), low, high))
        for name, least, most in _SECONDS:
            self._keep(name, float(number(ConfigError, name, getattr(self, name), least, most)))
        for name in _TEXTS:
            value = getattr(self, name)
            found = string(os.fspath(value) if isinstance(value, os.PathLike) else value)
            if value is not None and (found is None or "\0" in found or (not found and name != "root_path")):
                raise ConfigError(f"{name} is {show(value)}; give a text")
            self._keep(name, absolute(found) if found is not None and name in _PATHS else found)
        if self.enable_thinking is not None:
            self._keep("enable_thinking", boolean(ConfigError, "enable_thinking", self.enable_thinking))
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level is {show(self.log_level)}{nearest(show(self.log_level), LOG_LEVELS)}")
        self._check_address()
        self._check_cors()
        names = _names("served_model_names", self.served_model_names, 256)
        self._keep("served_model_names", names)
        self._keep("api_keys", self._all_keys())
        self._keep("chat_template", template_source(self.chat_template))
        if self.chat_template is not None:
            check_template(self.chat_template)
        for name in ("sampling", "chat_template_kwargs", "default_adapters"):
            value = getattr(self, name)
            found_map = {} if value is None else mapping(value)
            if found_map is None:
                raise ConfigError(f"{name} is {show(value)}; give a mapping of names to values")
            self._keep(name, found_map)
        usual = SamplingParams.from_options(**self.sampling)  # raises for an unknown name and a value outside its range
        for name in ("logprobs", "prompt_logprobs"):
            if has_too_many_logprobs(getattr(usual, name), self.max_logprobs):
                raise ConfigError(f"sampling has {name} {getattr(usual, name)}, above max_logprobs={self.max_logprobs}")
        adapter_set(dict(self.default_adapters))
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            given, missing = ("ssl_keyfile", "ssl_certfile")[:: 1 if self.ssl_keyfile else -1]
            raise ConfigError(f"{given} is {show(getattr(self, given))}, but {missing} is not given; TLS needs both")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError(f"ssl_ca_certs is {show(self.ssl_ca_certs)}, which needs ssl_certfile and ssl_keyfile")
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_bodies_bytes is {self.max_bodies_bytes}; it must be at least max_body_bytes, "
                f"{self.max_body_bytes}"
            )

    def _keep(self, name: str, value: object) -> None:
        if value is not getattr(self, name):
            object.__setattr__(self, name, value)

    def _check_address(self) -> None:
        if self.host is None:
            raise ConfigError("host is None; give an address, as 127.0.0.1 or 0.0.0.0")
        hosts = self.hosts
        if not hosts:
            raise ConfigError(f"host is {show(self.host)}; give an address, as 127.0.0.1 or 0.0.0.0")
        for path in (
            each for each in (self.uds, *hosts) if each is not None and (each == self.uds or _is_socket(each))
        ):
            if len(os.fsencode(path)) > _LONGEST_SOCKET:
                raise ConfigError(f"the socket {show(path)} has a path of more than {_LONGEST_SOCKET} bytes")
        if self.port == 0 and sum(not _is_socket(each) for each in hosts) > 1 and self.uds is None:
            raise ConfigError(f"port is 0, but host names several addresses, {self.host}; give a port")
        path = self.root_path or ""
        if path and (not path.startswith("/") or "//" in path or any(sign in path for sign in "?#% \t\r\n")):
            raise ConfigError(f"root_path is {show(path)}; give a path such as /llm")
        self._keep("root_path", path.rstrip("/"))
        allowed = _names("allowed_hosts", self.allowed_hosts, 253)
        for name in allowed:
            if name != ANY and not is_ip(name) and not _HOST.fullmatch(name):
                raise ConfigError(
                    f"allowed_hosts holds {show(name)}; give names such as llm.example.com or *.example.com, without "
                    "a port, or *"
                )
        self._keep("allowed_hosts", tuple(name.lower().rstrip(".") for name in allowed))

    def _check_cors(self) -> None:
        origins = _names("cors_origins", self.cors_origins, 1000)
        for origin in origins:
            if origin not in (ANY, LOCALHOST) and not _ORIGIN.fullmatch(origin.rstrip("/")):
                raise ConfigError(
                    f"cors_origins holds {show(origin)}; give origins such as https://app.example.com, localhost, or *"
                )
        self._keep("cors_origins", tuple(origin.rstrip("/").lower() for origin in origins))
        for name in ("cors_methods", "cors_headers"):
            values = _names(name, getattr(self, name), 256)
            for value in values:
                if not _TOKEN.fullmatch(value):
                    raise ConfigError(f"{name} holds {show(value)}; give names, with commas between them, or *")
            self._keep(name, values)
        if self.cors_credentials is not None:
            self._keep("cors_credentials", boolean(ConfigError, "cors_credentials", self.cors_credentials))
        if self.cors_credentials and ANY in self.cors_origins:
            raise ConfigError(
                "cors_credentials is on, but cors_origins has *: any page on the web could then act for the user of "
                "a browser; name the origins, or leave cors_credentials out"
            )
        if self.cors_credentials is None:
            self._keep("cors_credentials", bool(self.cors_origins) and ANY not in self.cors_origins)

    def _all_keys(self) -> tuple[str, ...]:
        keys = _names("api_keys", self.api_keys, None)
        object.__setattr__(self, "_given", keys)
        if self.api_key_file is not None:
            keys += read_keys(self.api_key_file)
        if len(keys) > _MOST_KEYS:
            raise ConfigError(f"there are {len(keys):,} keys; at most {_MOST_KEYS:,} are allowed")
        for place, entry in enumerate(keys, 1):
            _read_key(entry, place)
        return tuple(dict.fromkeys(keys))

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """The keys with their names and limits."""
        return tuple(_read_key(entry, place) for place, entry in enumerate(self.api_keys, 1))

    def read_keys_again(self) -> tuple[ApiKey, ...]:
        """Reads `api_key_file` again and returns all keys. Raises ConfigError."""
        return replace(self, api_keys=self._given).keys

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses of `host`, in order."""
        return tuple(part.strip() for part in self.host.split(",") if part.strip())

    @property
    def sockets(self) -> tuple[str, ...]:
        """Absolute paths of the UNIX sockets to listen on: `uds`, or else the sockets in `host`."""
        return (self.uds,) if self.uds is not None else tuple(absolute(each) for each in self.hosts if _is_socket(each))

    @property
    def addresses(self) -> tuple[str, ...]:
        """The internet addresses to listen on; none if `uds` is given."""
        return () if self.uds is not None else tuple(each for each in self.hosts if not _is_socket(each))

    @property
    def beyond_loopback(self) -> tuple[str, ...]:
        """The addresses to listen on, without loopback addresses. Other machines may reach them."""
        return tuple(each for each in self.addresses if not is_loopback(each))

    def check_exposure(self) -> None:
        """Raises ConfigError if other machines could use the model without a key, and `no_key` is False."""
        if self.beyond_loopback and not self.api_keys and not self.no_key:
            raise ConfigError(
                f"{self.beyond_loopback[0]} can be reached from other machines, and there is no key. Give one with "
                "--api-key (or LLAMABATCH_API_KEY, or --api-key-file), or allow any caller with --no-key"
            )


def has_too_many_logprobs(wanted: int | None, most: int) -> bool:
    """Returns True if `wanted`, the number of logprobs at each position, exceeds the limit `most`.

    For `wanted`, -1 means the whole vocabulary. For `most`, -1 means no limit.
    """
    return wanted is not None and most >= 0 and not 0 <= wanted <= most


def _is_socket(host: str) -> bool:
    return host.endswith(".sock")


def is_ip(text: str) -> bool:
    """True for an IP address, with or without brackets."""
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


@functools.lru_cache(maxsize=256)  # each request calls this function, mostly with the same host
def is_loopback(host: str) -> bool:
    """True for addresses and names that always mean this machine: 127.0.0.0/8, ::1, localhost and *.localhost."""
    name = host.lower().strip("[]").rstrip(".")
    if name == LOCALHOST or name.endswith(".localhost"):  # RFC 6761, 6.3
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def read_keys(path: str) -> tuple[str, ...]:
    """Returns the keys in a file with one key per line. Skips comments and empty lines. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST_KEY_FILE + 1)
        if len(data) > _LARGEST_KEY_FILE:
            raise ConfigError(f"api_key_file {shown(path)!r} is larger than {_LARGEST_KEY_FILE} bytes")
        lines = [line.strip() for line in data.decode().removeprefix("\ufeff").splitlines()]
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"api_key_file {shown(path)!r} cannot be read: {why}") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"api_key_file {shown(path)!r} holds no key; give one a line")
    return keys


def _read_key(entry: str, place: int) -> ApiKey:
    """Reads a key with its settings. Raises ConfigError with a message that never shows the key.

    Args:
        entry: the key, followed by optional settings: name=, rpm= and tpm=, each after a blank.
        place: the number of the key (from 1). A key without a name gets the name "key" and this number.
    """
    key, *settings = entry.split(" ")
    if not 0 < len(key) <= _LONGEST_KEY or not _KEY.fullmatch(key):
        raise ConfigError(
            f"a key of {len(key)} characters cannot be sent: give 1 to {_LONGEST_KEY} visible ASCII characters, "
            "without blanks"
        )
    found: dict[str, Any] = {"name": f"key{place}"}
    for setting in filter(None, settings):
        name, equals, value = setting.partition("=")
        if name in ("rpm", "tpm") and value.isdecimal() and 1 <= int(value[:12]) <= _MOST_A_MINUTE:
            found[name] = int(value)
        elif name == "name" and _KEY_NAME.fullmatch(value):
            found[name] = value
        else:
            shown = name if equals and name in ("name", "rpm", "tpm") else "something"
            raise ConfigError(
                f"key {place} has {shown} that cannot be read behind it; give name= with letters and digits, rpm= or "
                f"tpm= with 1 to {_MOST_A_MINUTE:,}"
            )
    return ApiKey(key, **found)


def _names(name: str, value: object, longest: int | None) -> tuple[str, ...]:
    """Returns the texts of a list, or the parts of a text with commas. Raises ConfigError, for example if a text has
    more than `longest` characters. If `longest` is None, the texts are keys, and the message does not show them."""
    shown = "hidden" if longest is None else show(value)
    text = string(value)
    parts: Iterable[Any] | None = text.split(",") if text is not None else items(value, _MOST_KEYS + 1)
    found: list[str] = []
    for part in () if parts is None else parts:
        each = string(part)
        if each is None:
            parts = None
            break
        if text is None or each.strip():
            found.append(each.strip())
    most = _MOST_KEYS if longest is None else _MOST_NAMES
    if parts is None or len(found) > most or any(not 1 <= len(each) <= (longest or _LONGEST_KEY) for each in found):
        limit = f" of 1 to {longest or _LONGEST_KEY} characters"
        raise ConfigError(f"{name} is {shown}; give at most {most:,} texts{limit}, with commas between them")
    return tuple(dict.fromkeys(found))


_FIELDS = tuple(f.name for f in fields(ServerOptions))


def split(options: Mapping[str, Any], engine: Iterable[str]) -> tuple[ServerOptions, dict[str, Any]]:
    """Returns the ServerOptions, and the options of the engine.

    Args:
        engine: names of the engine's options.

    Raises:
        UnknownOptionError: neither server nor engine has an option of this name.
        ConfigError: a value is refused.
    """
    known = set(engine)
    for name in options:
        if name not in _FIELDS and name not in known:
            raise UnknownOptionError(f"there is no option {show(name)}{nearest(str(name), (*_FIELDS, *known))}")
    own = {name: value for name, value in options.items() if name in _FIELDS}
    return ServerOptions(**own), {name: value for name, value in options.items() if name not in _FIELDS}
