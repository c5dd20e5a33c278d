"""Small files are whole at any time: a reader sees the old file or the new one."""

import pytest

from llamabatch.utils.atomic_file import replacement, write_text


def test_a_file_takes_the_place_of_the_one_before(tmp_path):
    path = tmp_path / "file.json"
    write_text(path, "old")
    write_text(path, "néw")
    assert path.read_text(encoding="utf-8") == "néw"
    assert path.stat().st_mode & 0o077 == 0  # only its owner may read it
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_raises_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file.json"
    write_text(path, "old")

    def write_half():
        with replacement(path) as temporary:
            temporary.write_text("half")
            assert path.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
