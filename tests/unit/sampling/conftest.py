"""The two implementations of sampling."""

import pytest

from llamabatch.sampling import native


@pytest.fixture(params=["compiled", "numpy"])
def implementation(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip(f"the compiled helper is {native.why_not()}")
