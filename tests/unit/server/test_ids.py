"""Ids of responses: their length, and that neither a program's seed nor a fork repeats them."""

import os
import random

import pytest

from llamabatch.server.http.ids import random_hex


def test_ids_have_two_digits_a_byte_and_differ_whatever_the_program_seeds():
    random.seed(1)
    first = {random_hex() for _ in range(1000)}
    random.seed(1)
    assert len(first | {random_hex() for _ in range(1000)}) == 2000
    assert {len(each) for each in first} == {24}
    assert len(random_hex(8)) == 16


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_has_ids_of_its_own():
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(theirs, random_hex().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(ours, 100).decode() != random_hex()
