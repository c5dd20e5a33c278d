"""The pictures of docs/architecture.md are those that docs/make_pictures.py draws from today's imports."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
_spec = importlib.util.spec_from_file_location("make_pictures", DOCS / "make_pictures.py")
maker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(maker)


@pytest.mark.parametrize("name", list(maker.PICTURES))
def test_a_picture_is_current(name):
    written = (DOCS / "images" / name).read_text(encoding="utf-8")
    assert maker.PICTURES[name]() == written, "run: python docs/make_pictures.py"


def test_each_picture_is_shown():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert [name for name in maker.PICTURES if f"(images/{name})" not in page] == []


def test_arrows_go_one_level_down_at_least():
    edges = maker.rooms()
    depth = maker.depths(edges)
    assert all(depth[room] > depth[other] for room, other in maker.direct(edges))
