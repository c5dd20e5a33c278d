"""Files of saved prefixes: any file is read as it was written, or refused."""

import hashlib
import json
import os
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamabatch.engine import prefix_file
from llamabatch.engine.prefix_file import PrefixFile
from llamabatch.errors import InputError
from llamabatch.request.media import MediaRun

FACTS = {"model": "m", "n_layer": 2}
PREFIX = PrefixFile(tuple(range(40)), bytes(range(256)))


@pytest.fixture(scope="module")
def prefix_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("prefix") / "saved.kv"
    prefix_file.write(path, PREFIX, FACTS)
    return path


def sealed(path, header, body=None, length=None):
    """Writes a file with this header and a right checksum. Returns its path."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = struct.pack("<40i", *PREFIX.token_ids) + PREFIX.state if body is None else body
    data = b"LLAMABATCH KV 1\n" + struct.pack("<I", len(header) if length is None else length) + header + body
    path.write_bytes(data + hashlib.blake2b(data, digest_size=32).digest())
    return path


def test_a_prefix_comes_back_from_its_file(prefix_path):
    assert prefix_file.read(prefix_path, FACTS) == PREFIX


SIZES = {**FACTS, "n_tokens": 40, "n_bytes": 256}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (SIZES | {"n_tokens": float("inf")}, "n_tokens inf"),
        (SIZES | {"n_tokens": -40}, "n_tokens -40"),
        (SIZES | {"n_tokens": 40.0}, "n_tokens 40.0"),
        (SIZES | {"n_tokens": True}, "n_tokens True"),
        (SIZES | {"n_tokens": 2**70}, "n_tokens"),
        (SIZES | {"n_tokens": 104, "n_bytes": -1}, "n_bytes -1"),
        (SIZES | {"n_tokens": "40"}, "n_tokens '40'"),
        (FACTS, "n_tokens None"),
        (SIZES | {"media_runs": 5}, "the picture 5"),
        (SIZES | {"media_runs": [[0, 2, 1]]}, r"the picture \[0, 2, 1\]"),
        (SIZES | {"media_runs": [[0, 2, 1, 1]]}, r"the picture \[0, 2, 1, 1\], which its tokens lack"),
        (SIZES | {"model": "x" * 10_000}, r"for model 'x.*\.\.\..*x'; this"),
        ([1], r"the header \[1\]"),
        (b"[" * 100_000, "no JSON"),
        (b"\xff", "no JSON"),
        (b'{"n_tokens": ' + b"9" * 5000 + b"}", "no JSON"),
    ],
)
def test_a_hostile_header_with_a_right_checksum_is_refused(header, says, tmp_path):
    with pytest.raises(InputError, match=says) as refusal:
        prefix_file.read(sealed(tmp_path / "bad.kv", header), FACTS)
    assert len(str(refusal.value)) < 500


def test_a_file_that_ends_before_its_header_is_refused(tmp_path):
    bad = tmp_path / "bad.kv"
    for data in (b"LLAMABATCH KV 1\n", b"LLAMABATCH KV 1\n\0\0"):
        bad.write_bytes(data + hashlib.blake2b(data, digest_size=32).digest())
        with pytest.raises(InputError, match="ends before its header"):
            prefix_file.read(bad, FACTS)
    for length in (2**32 - 1, 2**21, 1000):
        with pytest.raises(InputError, match=f"a header of {length} bytes"):
            prefix_file.read(sealed(bad, SIZES, length=length), FACTS)


def test_a_file_with_pictures_is_for_one_mmproj_file(tmp_path):
    text, shown = tmp_path / "text.kv", tmp_path / "shown.kv"
    pictured = PrefixFile((1, -7, -9, *range(37)), PREFIX.state)
    facts = {**FACTS, "mmproj": "of a model"}
    others = ({**FACTS, "mmproj": None}, FACTS, {**FACTS, "mmproj": "another"})
    prefix_file.write(text, PREFIX, facts)
    prefix_file.write(shown, pictured, facts)
    head, ids = prefix_file.read_head(shown)
    assert prefix_file.read(shown, facts) == pictured
    assert prefix_file.fits(head, facts, ids)
    for other in others:
        with pytest.raises(InputError, match=r"load the model with mmproj|is for mmproj 'of a model'"):
            prefix_file.read(shown, other)
        assert not prefix_file.fits(head, other, ids)
        assert prefix_file.read(text, other) == PREFIX
        assert prefix_file.fits(prefix_file.read_head(text)[0], other, PREFIX.token_ids)
    nameless = struct.pack("<40i", *pictured.token_ids) + PREFIX.state
    for engine in (facts, *others):
        with pytest.raises(InputError, match="mmproj"):
            prefix_file.read(sealed(shown, SIZES, nameless), engine)
        assert not prefix_file.fits(SIZES, engine, pictured.token_ids)


def test_pictures_with_fewer_positions_than_cells(tmp_path):
    path, facts = tmp_path / "shown.kv", {**FACTS, "mmproj": "of a model"}
    runs = tuple(MediaRun(start, length, 0, 0, True, n_pos, 1) for start, length, n_pos in ((1, 4, 2), (6, 3, 3)))
    shown = PrefixFile((1, -2, -3, -4, -5, 6, -7, -8, -9, *range(31)), PREFIX.state, runs)
    prefix_file.write(path, shown, facts)
    assert prefix_file.read(path, facts) == shown
    ids = struct.pack("<40i", *shown.token_ids) + shown.state
    for bad in (
        *([0, 4, 2, 1], [1, 5, 2, 1], [-1, 4, 2, 1], [1, 0, 0, 1], [1, 4, 0, 1], [1, 4, 5, 1], [1, 4, 2, 0]),
        *([1, 4, 2, 5], [1, 4, 2.0, 1], [1, 4, True, 1], [6, 2**80, 2, 1], "1421", None),
    ):
        sealed(path, {**facts, "n_tokens": 40, "n_bytes": 256, "media_runs": [bad]}, ids)
        with pytest.raises(InputError, match="which its tokens lack"):
            prefix_file.read(path, facts)
    sealed(path, {**facts, "n_tokens": 40, "n_bytes": 256, "media_runs": [[1, 4, 2, 1], [3, 2, 2, 1]]}, ids)
    with pytest.raises(InputError, match=r"the picture \[3, 2, 2, 1\]"):
        prefix_file.read(path, facts)


def test_more_than_an_engine_can_hold_is_refused_before_it_is_read(prefix_path, tmp_path):
    with pytest.raises(InputError, match="40 tokens; n_ctx is 39"):
        prefix_file.read(prefix_path, FACTS, most_tokens=39)
    with pytest.raises(InputError, match="256 bytes of state; at most 255"):
        prefix_file.read(prefix_path, FACTS, most_bytes=255)
    hole = tmp_path / "hole.kv"
    hole.write_bytes(prefix_path.read_bytes())
    os.truncate(hole, 2**40)  # no memory could hold it, and nobody could wait for its checksum
    with pytest.raises(InputError, match=r"damaged or was cut off: .* which announces 416"):
        prefix_file.read(hole, FACTS)


def test_a_name_of_two_lines_is_one_line_in_messages(tmp_path):
    with pytest.raises(InputError) as refusal:
        prefix_file.read(tmp_path / "two\nlines.kv", FACTS)
    assert "\n" not in str(refusal.value)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(InputError, match="no regular file"):
            prefix_file.read(name, FACTS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from([40, 256, "m"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(SIZES)), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changed=st.dictionaries(st.sampled_from(list(SIZES)), JSON, max_size=3),
    length=st.none() | st.integers(0, 2**32 - 1),
    flips=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=4),
    cut=st.none() | st.integers(0, 600),
)
def test_any_file_with_a_right_checksum_is_read_or_refused(tmp_path, changed, length, flips, cut):
    path = sealed(tmp_path / "any.kv", SIZES | changed, length=length)
    data = bytearray(path.read_bytes()[:-32])[:cut]
    for at, value in flips:
        if at < len(data):
            data[at] = value
    path.write_bytes(bytes(data) + hashlib.blake2b(data, digest_size=32).digest())
    try:
        prefix = prefix_file.read(path, FACTS)
    except InputError:
        return
    assert prefix.token_ids
    assert min(prefix.token_ids) >= 0
    assert prefix.state
