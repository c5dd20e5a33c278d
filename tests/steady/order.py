"""A plugin of pytest that runs the files in a random order: `-p tests.steady.order --order SEED`."""

from __future__ import annotations

import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", type=int, metavar="SEED", help="of the order of the files")


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # else pytest-xdist would begin with the largest files


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--order")
    ranks = {path: random.Random(f"{seed} {path.name}").random() for path in {item.path for item in items}}
    items.sort(key=lambda item: ranks[item.path])
