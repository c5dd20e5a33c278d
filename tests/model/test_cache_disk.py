"""cache_disk stores prefixes in a folder, and later engines read them."""

import os
import re
import shutil
import signal

import pytest

from llamabatch import LLM, ConfigError, SamplingParams
from llamabatch.engine import prefix_folder
from llamabatch.llama import library
from llamabatch.utils import system
from tests.waiting import until

N_TOKENS = 400
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


def prompt(number, length=N_TOKENS):
    return {"prompt_token_ids": [(7 * i + 131 * number) % 900 + 300 for i in range(length)]}


def opened(folder, **options):
    given = {"n_slots": 2, "instances": 1, "n_ctx": 1024, "isolate": False, "cache_disk": folder}
    return LLM("tiny", **{**given, **options})


def texts(llm, *numbers, params=PARAMS, length=N_TOKENS):
    outputs = llm.generate([prompt(number, length) for number in numbers], params)
    assert not any(output.error for output in outputs)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def files(folder):
    return sorted(folder.rglob("*.prefix"))


def read(llm):
    return llm.stats().read_tokens


def ran(folder, *numbers, **options):
    """Runs prompts in an engine, and returns their texts. The engine's end writes all of its prefixes to the disk."""
    with opened(folder, **options) as llm:
        return texts(llm, *numbers)


def test_a_later_engine_reads_what_an_earlier_one_left(tmp_path):
    folder = tmp_path / "made of prompts" / "x"
    first = ran(folder, 0, 1)
    assert len(files(folder)) == 2
    with opened(folder) as llm:
        assert texts(llm, 0, 1) == first
        assert read(llm) == 2 * (N_TOKENS - 1)
        assert llm.stats().cache_disk_bytes == sum(path.stat().st_size for path in files(folder))
        assert read(llm) == llm.stats().restored_tokens
    if os.name == "posix":
        assert {path.stat().st_mode & 0o777 for path in files(folder)} == {0o600}
        assert files(folder)[0].parent.stat().st_mode & 0o777 == 0o700


def test_they_are_written_while_nothing_is_to_be_done(tmp_path):
    with opened(tmp_path) as llm:
        texts(llm, 0)
        until(lambda: len(files(tmp_path)) == 1)
        texts(llm, 1, 2)
        until(lambda: len(files(tmp_path)) == 3)


def test_more_of_them_than_slots_are_read_at_once(tmp_path):
    first = ran(tmp_path, *range(6))
    with opened(tmp_path) as llm:
        assert texts(llm, *range(6)) == first
        assert read(llm) == 6 * (N_TOKENS - 1)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_killed_engine_finds_its_prefixes(tmp_path):
    with opened(tmp_path, isolate=True) as llm:
        first = texts(llm, 0)
        until(lambda: files(tmp_path))
        os.kill(llm._client.pids[0], signal.SIGKILL)
        until(lambda: llm.stats().restarts == 1)
        assert texts(llm, 0) == first
        assert read(llm) == N_TOKENS - 1


def damaged(path, change):
    content = bytearray(path.read_bytes())
    path.write_bytes(bytes(change(content)))


def flipped(content):
    content[len(content) // 2] ^= 1
    return content


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (flipped, "its checksum differs"),
        (lambda content: content[:-100], "damaged or was cut off"),
        (lambda content: content[:40], "ends before its header"),
        (lambda content: b"", "no prefix file"),
        (lambda content: b"GGUF" * 100, "no prefix file"),
    ],
)
def test_damaged_files_are_passed_over_and_named(tmp_path, caplog, change, reason):
    first = ran(tmp_path, 0)
    [path] = files(tmp_path)
    damaged(path, change)
    with opened(tmp_path) as llm:
        assert texts(llm, 0) == first
        assert read(llm) == 0
    assert reason in caplog.text
    assert str(tmp_path) in caplog.text
    with opened(tmp_path) as llm:  # the file was written again
        assert texts(llm, 0) == first
        assert read(llm) == N_TOKENS - 1


def test_a_file_that_is_lost_meanwhile_is_computed(tmp_path, caplog):
    first = ran(tmp_path, 0)
    with opened(tmp_path) as llm:
        files(tmp_path)[0].unlink()
        assert texts(llm, 0) == first
        assert read(llm) == 0
    assert not caplog.text


@pytest.mark.parametrize(
    "options", [{"type_k": "q8_0"}, {"rope_freq_base": 20000.0}, {"kv": "unified"}, {"extra_bufts": "off"}]
)
def test_other_engines_have_files_of_their_own(tmp_path, options):
    ran(tmp_path, 0)
    with opened(tmp_path, **options) as llm:
        texts(llm, 0)
        assert read(llm) == 0
    assert len(files(tmp_path)) == 2


def test_a_shorter_context_passes_longer_prefixes_over(tmp_path, caplog):
    ran(tmp_path, 0)
    with opened(tmp_path, n_ctx=256) as llm:
        texts(llm, 0, length=200)
        assert read(llm) == 0
    assert not caplog.text
    assert len(files(tmp_path)) == 1


def test_the_salt_is_part_of_the_key_and_not_in_the_file(tmp_path):
    salted = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, cache_salt="tenant-7")
    with opened(tmp_path) as llm:
        first = texts(llm, 0, params=salted)
    assert b"tenant" not in files(tmp_path)[0].read_bytes()
    with opened(tmp_path) as llm:
        assert texts(llm, 0) == first
        assert read(llm) == 0
        assert texts(llm, 0, params=salted) == first
        assert read(llm) == N_TOKENS - 1


def test_the_folder_never_exceeds_its_bytes_and_the_least_recently_used_go(tmp_path):
    ran(tmp_path, 0)
    one = files(tmp_path)[0].stat().st_size
    fit = 2**20 // one
    ran(tmp_path, *range(1, fit), cache_disk_mib=1)
    kept = {path: at for at, path in enumerate(files(tmp_path))}
    assert len(kept) == fit
    for path, at in kept.items():  # a file system with times of whole seconds would not show the order
        os.utime(path, (at, at))
    with opened(tmp_path, cache_disk_mib=1) as llm:
        texts(llm, 99)
        until(lambda: set(files(tmp_path)) - kept.keys())
    left = files(tmp_path)
    assert sum(path.stat().st_size for path in left) <= 2**20
    assert next(iter(kept)) not in left
    assert len(left) == fit


def test_other_files_of_the_folder_stay(tmp_path):
    ran(tmp_path, 0)
    home = files(tmp_path)[0].parent
    mine = [tmp_path / "download.part", home / "notes.prefix", home / "a.prefix.1.part", tmp_path / "x" / "y.prefix"]
    mine[-1].parent.mkdir()
    for path in mine:
        path.write_text("mine")
    part = home / f"{'a' * 32}.prefix.123.part"
    part.write_text("of a process that was killed")
    folder = home / f"{'b' * 32}.prefix"
    folder.mkdir()
    with opened(tmp_path, cache_disk_mib=1) as llm:
        texts(llm, 1)
        llm.reset_prefix_cache()
    assert all(path.read_text() == "mine" for path in mine)
    assert not part.exists()


def test_reset_deletes_the_files(tmp_path):
    ran(tmp_path, 0)
    with opened(tmp_path) as llm:
        llm.reset_prefix_cache()
        assert not files(tmp_path)
        texts(llm, 0)
        assert read(llm) == 0


def test_reset_deletes_what_others_have_written_since(tmp_path):
    with opened(tmp_path) as llm:
        ran(tmp_path, 0)
        assert files(tmp_path)
        llm.reset_prefix_cache()
        assert not files(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="modes, pipes")
def test_the_folder_is_of_this_user_alone(tmp_path):
    before = os.umask(0)
    try:
        ran(tmp_path / "x", 0)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "x").rglob("*") if path.is_file()}
    folders = {path.stat().st_mode & 0o777 for path in (tmp_path / "x", *(tmp_path / "x").glob("*/"))}
    assert (modes, folders) == ({0o600}, {0o700})


@pytest.mark.skipif(os.name == "nt", reason="modes, pipes")
def test_nobody_waits_for_ever_for_the_folder(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(prefix_folder, "_LOCK_S", 0.3)
    with (tmp_path / ".lock").open("w") as file:
        assert system.lock(file.fileno())
        with pytest.raises(ConfigError, match=r"cache_disk is .*another process has held \.lock for 0 s"):
            opened(tmp_path)
    with opened(tmp_path) as llm:
        with (tmp_path / ".lock").open("w") as file:
            assert system.lock(file.fileno())
            texts(llm, 0)
            until(lambda: "a prefix is not kept" in caplog.text)
        texts(llm, 1)
        until(lambda: files(tmp_path))
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ConfigError, match="is no regular file"):
        opened(tmp_path)


def test_a_text_that_goes_on_takes_the_place_of_its_beginning(tmp_path):
    with opened(tmp_path) as llm:
        for length in (400, 420, 600):  # the second text is too little longer than the first for a file of its own
            texts(llm, 0, length=length)
            until(lambda: len(files(tmp_path)) == 1)
    header = files(tmp_path)[0].read_bytes()[:2000]
    assert int(re.search(rb'"n_tokens": (\d+)', header)[1]) == 607


def test_a_promise_of_equal_bits_reads_no_prompts_that_other_kernels_computed(tmp_path):
    has_prompts = "prompts" in library.repack_features()  # AMX: native_patches/0020
    ran(tmp_path, 0)
    with opened(None, batch_invariant=True) as llm:
        fresh = texts(llm, 0)
    with opened(tmp_path, batch_invariant=True) as llm:
        assert texts(llm, 0) == fresh
        assert read(llm) == (0 if has_prompts else N_TOKENS - 1)


def test_a_folder_that_was_deleted_meanwhile_is_made_again(tmp_path, caplog):
    with opened(tmp_path / "x") as llm:
        texts(llm, 0)
        until(lambda: files(tmp_path))
        shutil.rmtree(tmp_path / "x")
        texts(llm, 1)
        until(lambda: files(tmp_path))
    assert not caplog.text


def test_a_full_disk_is_told_once_and_nothing_else_suffers(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(prefix_folder, "_LEFT_FREE", 2**60)
    with opened(tmp_path) as llm:
        texts(llm, 0, 1, 2, 3)
    assert caplog.text.count("is not kept") == 1
    assert not files(tmp_path)


def test_old_files_make_room_on_a_full_disk(tmp_path, monkeypatch, caplog):
    with opened(tmp_path) as llm:
        texts(llm, 0)
        until(lambda: files(tmp_path))
        [old] = files(tmp_path)
        usage = type("Usage", (), {"free": prefix_folder._LEFT_FREE + 100_000})
        monkeypatch.setattr(prefix_folder.shutil, "disk_usage", lambda folder: usage)
        texts(llm, 1)
        until(lambda: files(tmp_path) not in ([], [old]))
        assert len(files(tmp_path)) == 1
    assert not caplog.text


def test_a_disk_that_cannot_be_written_any_more_is_told_once(tmp_path, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefix_folder.prefix_file, "write", full)
    with opened(tmp_path) as llm:
        texts(llm, 0, 1, 2, 3)
    assert caplog.text.count("no more prefixes are written") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_ram": 0}, "cache_disk is given, but cache_ram is 0"),
        ({"cache_prefix": False}, "cache_disk is given, but cache_prefix is False"),
        ({"cache_disk_mib": 0}, "cache_disk_mib is 0"),
        ({"cache_disk": ""}, "cache_disk"),
        ({"cache_disk": "/dev/null/x"}, "give a folder to write to"),
    ],
)
def test_bad_values_are_named(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, **options)
