"""A thread that runs only while another one waits for it."""

import threading

import pytest

from llamabatch.llama.sliced_thread import SlicedThread


@pytest.fixture
def thread():
    thread = SlicedThread("test")
    yield thread
    thread.close()


def test_a_job_runs_in_slices(thread):
    done = []

    def job() -> None:
        for number in range(3):
            done.append(number)
            thread.may_go_on()

    thread.start(job)
    assert not done
    assert not thread.advance(0)
    assert done == [0]
    assert not thread.advance(0)
    assert thread.is_busy
    assert not thread.advance(0)
    assert thread.advance(0)
    assert done == [0, 1, 2]
    assert not thread.is_busy


def test_a_slice_that_is_long_enough_ends_the_job(thread):
    thread.start(lambda: [thread.may_go_on() for _ in range(100)])
    assert thread.advance(60)


def test_an_error_of_the_job_is_raised_and_the_next_job_runs(thread):
    thread.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        thread.advance(1)
    done = threading.Event()
    thread.start(done.set)
    assert thread.advance(1)
    assert done.is_set()


def test_close_ends_a_job_that_waits(thread):
    ended = []

    def job() -> None:
        while thread.may_go_on():
            pass
        ended.append(True)

    thread.start(job)
    thread.advance(0)
    thread.close()
    assert ended == [True]
