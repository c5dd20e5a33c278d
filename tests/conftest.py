"""What all tests share."""

import os

import pytest

from llamabatch import profile_store


@pytest.fixture(autouse=True, scope="session")
def no_profiles_of_this_machine(tmp_path_factory):
    """Tests say what the rules do, whatever was tuned here; one that sets LLAMABATCH_CACHE has profiles of its own."""
    nowhere, real, at_start = tmp_path_factory.mktemp("no-profiles"), profile_store.folder, os.environ.get(CACHE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_store, "folder", lambda: real() if os.environ.get(CACHE) != at_start else nowhere)
        yield


CACHE = "LLAMABATCH_CACHE"
