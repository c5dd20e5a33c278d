"""docs/reference.md is made from the docstrings, and every public name has a docstring."""

import importlib.util
import inspect
from pathlib import Path

import llamabatch

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_current():
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    written = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert maker.page() == written, "run: python docs/make_reference.py"


def test_every_public_name_and_method_says_what_it_does():
    missing = []
    for name in llamabatch.__all__:
        thing = getattr(llamabatch, name)
        if not inspect.isclass(thing):
            continue
        members = {f"{name}.{key}": value for key, value in vars(thing).items() if not key.startswith("_")}
        functions = {key: getattr(value, "fget", value) for key, value in members.items()}
        shown = {key: value for key, value in functions.items() if inspect.isfunction(value)}
        missing += [key for key, value in {name: thing, **shown}.items() if not inspect.getdoc(value)]
    assert missing == []
