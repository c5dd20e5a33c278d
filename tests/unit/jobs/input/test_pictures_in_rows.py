"""Pictures in rows: columns of tables, fields of lines, messages. Relative paths begin at the input file."""

import json

import pytest

from llamabatch.errors import ConfigError
from llamabatch.jobs.input.reader import Reader, read
from llamabatch.jobs.input.sources import find
from llamabatch.jobs.rows import BadRow, ReadOptions

ASK = "What is this?"


def contents(path, **options):
    """Returns the content of the last message of each row, or its error."""
    rows = read(find([path]), ReadOptions(**options))
    return [row.error if isinstance(row, BadRow) else row.prompt[-1]["content"] for row in rows]


def image(given):
    return {"type": "image", "image": str(given)}


def text(given):
    return {"type": "text", "text": given}


def test_a_column_of_paths_beside_the_table(tmp_path, monkeypatch):
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "photos.csv").write_text(f"file,name\ncat.png,Cat\n{tmp_path}/dog.png,Dog\n,None\n")
    monkeypatch.chdir(tmp_path)
    options = {"image_columns": ("file",), "system": "Be {{ name }}."}
    found = contents(folder / "photos.csv", prompt="Is it {{ name }}?", **options)
    assert found[:2] == [
        [image(folder / "cat.png"), text("Is it Cat?")],
        [image(tmp_path / "dog.png"), text("Is it Dog?")],
    ]
    assert found[2].endswith("photos.csv, row 3: there is no picture in 'file'")
    assert contents(folder / "photos.csv", prompt=ASK, **options)[0] == [image(folder / "cat.png"), text(ASK)]
    with pytest.raises(ConfigError, match="has no column 'flie' of pictures; did you mean 'file'"):
        contents(folder / "photos.csv", prompt=ASK, image_columns=("flie",))
    with pytest.raises(ConfigError, match="as --prompt 'Describe this"):
        contents(folder / "photos.csv", image_columns=("file",))
    with pytest.raises(ConfigError, match="an embedding is one of a text"):
        ReadOptions(image_columns=("file",), task="embedding")


def test_lines_of_json_by_a_field_and_by_their_messages(tmp_path):
    messages = [{"role": "user", "content": [image("cat.png"), text(ASK)]}]
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": ASK, "photo": ["cat.png", "dog.png"]}, {"prompt": ASK, "photo": "data:image/png;base64,AA=="}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = [image(tmp_path / "cat.png"), image(tmp_path / "dog.png"), text(ASK)]
    assert contents(path, image_columns=("photo",)) == [both, [image("data:image/png;base64,AA=="), text(ASK)]]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    assert contents(path) == [[image(tmp_path / "cat.png"), text(ASK)]]


def test_no_file_is_read_for_the_line_of_a_stranger(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": [image("/etc/secret.png")]}]}) + "\n")
    [row] = Reader(find([path]), read_line=pytest.fail)
    assert "a part of type 'image'" in row.error


def test_pictures_within_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    cells = [{"bytes": b"png", "path": "cat.png"}, {"bytes": None, "path": "cat.png"}, None]
    pq.write_table(pa.table({"image": cells, "raw": [b"a", None, None]}), tmp_path / "a.parquet")
    found = contents(tmp_path / "a.parquet", prompt=ASK, image_columns=("image", "raw"))
    assert found[0] == [{"type": "image", "image": b"png"}, {"type": "image", "image": b"a"}, text(ASK)]
    assert found[1] == [image(tmp_path / "cat.png"), text(ASK)]
    assert "there is no picture in 'image', 'raw'" in found[2]
