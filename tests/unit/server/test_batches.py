"""Batches without HTTP and without a model: states, files of results, restarts, windows, disk."""

import errno
import json
import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from llamabatch.errors import ConfigError, InputError, OutputError
from llamabatch.gguf.resolve import resolve
from llamabatch.jobs import OutputOptions, RecordOptions, Settings
from llamabatch.jobs.input.lines import Overlay, parse_openai
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.server.batches import runner as runner_module
from llamabatch.server.batches.check import MAX_ERRORS, check_lines
from llamabatch.server.batches.records import (
    BatchRecord,
    FileRecord,
    expiry_of,
    metadata_of,
    new_batch_id,
    new_file_id,
    safe_name,
)
from llamabatch.server.batches.results import write_results
from llamabatch.server.batches.runner import Batches
from llamabatch.server.batches.service import BatchService
from llamabatch.server.batches.store import Store
from llamabatch.server.batches.window import Window, seconds_of
from llamabatch.server.http.errors import ApiError
from llamabatch.server.openai.batch_lines import reader_of
from llamabatch.server.options import ServerOptions
from tests.unit.jobs.test_shared import HeldClient
from tests.waiting import until

URL = "/v1/completions"


class Engine(HeldClient):
    """Ends requests on a thread: `per_look` of them each 5 ms, and about `most` in all."""

    def __init__(self, per_look=3, most=10**9):
        super().__init__()
        self.per_look, self.most = per_look, most
        self.alive = True
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while self.alive:
            if len(self.seen) - len(self.in_flight) < self.most:
                self.end(self.per_look)
            time.sleep(0.005)


class Host:
    def __init__(self, client, model="one"):
        self.client = client
        self.model = model
        self.read = []

    def model_identity(self):
        return {"name": self.model, "size": 1, "sha256": "0"}

    def settings(self, source, journal):
        records = RecordOptions(shape="openai", model="fake")
        writing = OutputOptions(order="finished", force=True, records=records)
        return Settings((str(source),), str(journal), writing=writing, max_start_errors=0)

    def reader(self, endpoint):
        overlay = Overlay(SamplingParams())
        return lambda line: parse_openai(line, overlay)


class World:
    """A data folder that several runs of a server use."""

    def __init__(self, folder):
        self.folder = folder / "data"
        self.engines = []
        self.batches = None
        self.offset = 0.0

    def clock(self):
        return time.time() + self.offset

    def start(self, client=None, model="one", max_bytes=10**9):
        client = client or Engine()
        self.engines.append(client)
        self.store = Store(self.folder, max_bytes, self.clock)
        self.batches = Batches(self.store, Host(client, model))
        self.batches.start()
        return self

    def stop(self):
        self.batches.stop()
        self.store.close()

    def upload(self, lines):
        data = "".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines).encode()
        file_id = new_file_id()
        self.store.unfinished(file_id).write_bytes(data)
        self.store.add_file(FileRecord(file_id, len(data), int(self.clock()), "in.jsonl"))
        return file_id

    def create(self, lines, window="24h", **more):
        file_id = lines if isinstance(lines, str) else self.upload(lines)
        now = self.clock()
        batch = BatchRecord(new_batch_id(), URL, file_id, window, int(now), int(now + seconds_of(window)), **more)
        self.batches.add(batch)
        return batch.id

    def wait(self, batch_id, *states):
        def reached():
            batch = self.store.batch(batch_id)
            is_it = batch.status in (states or ("completed",))
            assert is_it or not batch.has_ended, batch
            return is_it and batch

        return until(reached, lambda: self.store.batch(batch_id))

    def journals(self):
        """Returns the folders of batches, once the threads of ended batches are gone."""
        until(lambda: not self.batches._running)
        return [path for path in (self.folder / "batches").iterdir() if path.is_dir()]

    def lines(self, file_id):
        return [json.loads(line) for line in self.store.content(file_id).read_text().splitlines()]

    def all_lines(self, batch):
        return [each for one in (batch.output_file_id, batch.error_file_id) if one for each in self.lines(one)]


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "_LOOK_S", 0.02)
    monkeypatch.setattr(runner_module, "_PAUSE_S", 0.1)
    made = World(tmp_path)
    yield made
    if made.batches is not None:
        made.stop()
    for engine in made.engines:
        engine.alive = False


def line(i, **body):
    return {"custom_id": f"id {i}", "method": "POST", "url": URL, "body": {"prompt": f"prompt {i}", **body}}


def lines(n):
    return [line(i) for i in range(n)]


def test_a_batch_ends_with_a_line_for_each_id_and_leaves_no_journal(world):
    world.start()
    asked = lines(50)
    asked[7]["body"]["temperature"] = -1
    batch = world.wait(world.create(asked, metadata={"a": "b"}))
    assert (batch.total, batch.completed, batch.failed) == (50, 49, 1)
    results = {each["custom_id"]: each for each in world.lines(batch.output_file_id)}
    assert set(results) == {f"id {i}" for i in range(50)} - {"id 7"}
    assert results["id 3"]["response"]["body"]["choices"][0]["text"] == "of prompt 3"
    [failed] = world.lines(batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"], failed["error"]) == ("id 7", 400, None)
    assert failed["response"]["body"]["error"]["message"].startswith("line 8: temperature is -1")
    shown = batch.to_openai()
    assert shown["request_counts"] == {"total": 50, "completed": 49, "failed": 1}
    assert shown["created_at"] <= shown["in_progress_at"] <= shown["finalizing_at"] <= shown["completed_at"]
    assert (shown["errors"], shown["failed_at"], shown["metadata"]) == (None, None, {"a": "b"})
    assert world.journals() == []
    assert world.store.file(batch.output_file_id).bytes == world.store.content(batch.output_file_id).stat().st_size
    assert all(r.params.background for r in world.engines[0].seen)


def test_a_restart_goes_on_and_does_no_line_twice(world):
    world.start(Engine(per_look=1, most=30))
    batch_id = world.create(lines(300))
    for _ in range(3):
        until(lambda: len(world.engines[-1].seen) >= 30)
        world.stop()
        assert world.store.batch(batch_id).status == "in_progress"
        world.start(Engine(per_look=1, most=30))
    world.engines[-1].per_look, world.engines[-1].most = 50, 300
    batch = world.wait(batch_id)
    assert sorted(each["custom_id"] for each in world.lines(batch.output_file_id)) == sorted(
        f"id {i}" for i in range(300)
    )


@pytest.mark.parametrize("step", range(1, 10))
def test_a_process_that_ends_anywhere_in_the_end_of_a_batch_loses_and_doubles_nothing(world, step, monkeypatch):
    class Killed(BaseException):
        pass

    calls = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += dying
            if calls == step and dying:
                raise Killed
            return real(*args, **kwargs)

        return call

    dying = False
    world.start()
    monkeypatch.setattr(runner_module.logger, "exception", lambda *args: None)
    monkeypatch.setattr(runner_module._Run, "_fail_after", lambda self, error: setattr(world, "died", True))
    monkeypatch.setattr(runner_module.Batches, "ended", lambda self, run, pause_s=0.0: None)  # no batch is tried again
    for name in ("put_batch", "add_file", "remove_journal"):
        monkeypatch.setattr(world.store, name, counted(getattr(world.store, name)))
    monkeypatch.setattr(runner_module, "write_results", counted(runner_module.write_results))
    asked = lines(20)
    asked[4]["body"]["n"] = 0
    file_id = world.upload(asked)
    with world.batches.mutex:
        batch_id = world.create(file_id)
        dying = True
    until(lambda: getattr(world, "died", False) or world.store.batch(batch_id).has_ended)
    dying = False
    world.stop()
    monkeypatch.undo()
    monkeypatch.setattr(runner_module, "_LOOK_S", 0.02)
    batch = world.start().wait(batch_id)
    assert (batch.completed, batch.failed) == (19, 1)
    assert sorted(each["custom_id"] for each in world.all_lines(batch)) == sorted(f"id {i}" for i in range(20))
    names = sorted(path.name for path in (world.folder / "files").iterdir())
    assert len(names) == 6, names  # a record and the content of three files
    assert world.journals() == []


def test_cancel_keeps_what_is_done_and_names_the_rest(world):
    engine = HeldClient()
    world.start(engine)
    batch_id = world.create(lines(30))
    until(lambda: len(engine.in_flight) >= 8)
    engine.end(3)
    until(lambda: world.store.batch(batch_id).completed >= 3)
    assert world.batches.cancel(batch_id).status == "cancelling"
    batch = world.wait(batch_id, "cancelled")
    assert engine.in_flight == {}
    assert (batch.total, batch.completed, batch.failed) == (30, 3, 27)
    assert {each["error"]["code"] for each in world.lines(batch.error_file_id)} == {"batch_cancelled"}
    assert sorted(each["custom_id"] for each in world.all_lines(batch)) == sorted(f"id {i}" for i in range(30))
    assert world.batches.cancel(batch_id).status == "cancelled"


def test_a_window_that_ends_expires_the_rest_and_promotes_before_that(world):
    engine = HeldClient()
    world.start(engine)
    batch_id = world.create(lines(20), window="1h")
    until(lambda: len(engine.in_flight) >= 8)
    assert all(r.params.background for r in engine.seen)
    run = world.batches._running[batch_id]
    assert run.shared is None or run.shared.background
    world.offset = 2000.0  # the second half of 3600 s begins, and no row is done
    until(lambda: not run.shared.background and len(engine.in_flight) >= 8 and engine.aborted)
    engine.end(2)
    until(lambda: world.store.batch(batch_id).completed >= 2)
    assert not any(r.params.background for r, _ in engine.in_flight.values())
    world.offset = 3601.0
    batch = world.wait(batch_id, "expired")
    assert (batch.completed, batch.failed) == (2, 18)
    assert {each["error"]["code"] for each in world.lines(batch.error_file_id)} == {"batch_expired"}
    assert batch.to_openai()["expired_at"] >= batch.expires_at


def test_a_window_that_ended_while_the_server_was_away_expires_at_its_start(world):
    engine = HeldClient()
    world.start(engine)
    batch_id = world.create(lines(20), window="10m")
    world.wait(batch_id, "in_progress")
    world.stop()
    world.offset = 700.0
    batch = world.start().wait(batch_id, "expired")
    assert (batch.completed, batch.failed) == (0, 20)
    assert batch.output_file_id is None


def test_a_file_that_is_no_batch_fails_with_the_numbers_of_its_lines(world):
    world.start()
    asked = [*lines(3), "{no json\n", line(1), {**line(8), "url": "/v1/embeddings"}, {**line(9), "method": "GET"}]
    batch = world.wait(world.create(asked), "failed")
    found = [(each["code"], each["line"]) for each in batch.to_openai()["errors"]["data"]]
    assert found == [("invalid_json_line", 4), ("duplicate_custom_id", 5), ("invalid_url", 6), ("invalid_method", 7)]
    assert batch.failed_at is not None
    assert batch.output_file_id is None


def test_an_engine_that_is_gone_loses_no_batch(world):
    class Dying(Engine):
        def submit(self, requests, sink, *, stream=False):
            if len(self.seen) > 20:
                self.closed = True
            super().submit(requests, sink, stream=stream)

    world.start(Dying())
    batch_id = world.create(lines(60))
    until(lambda: world.engines[0].closed)
    time.sleep(0.05)
    assert world.store.batch(batch_id).status == "in_progress"
    world.stop()
    batch = world.start().wait(batch_id)
    assert (batch.completed, batch.failed) == (60, 0)


def test_batches_run_side_by_side_and_a_near_window_does_not_wait_for_a_place(world):
    engine = HeldClient()
    world.start(engine)
    ids = [world.create(lines(20)) for _ in range(5)]

    def states():
        return sorted(world.store.batch(each).status for each in ids)

    until(lambda: states() == ["in_progress"] * 4 + ["validating"])
    near = world.create(lines(2), window="1h")
    world.offset = 2000.0  # the second half of the window
    world.wait(near, "in_progress")
    world.offset = 3601.0
    world.wait(near, "expired")
    assert states() == ["in_progress"] * 4 + ["validating"]


def test_a_batch_of_another_model_waits_and_may_be_cancelled(world):
    engine = HeldClient()
    world.start(engine)
    batch_id = world.create(lines(5))
    world.wait(batch_id, "in_progress")
    world.stop()
    world.start(Engine(), model="two")
    time.sleep(0.05)
    assert world.store.batch(batch_id).status == "in_progress"
    assert world.engines[-1].seen == []
    world.batches.cancel(batch_id)
    assert world.wait(batch_id, "cancelled").failed == 5


def test_a_full_folder_refuses_uploads_and_stops_batches_until_there_is_room(world):
    engine = HeldClient()
    world.start(engine)
    batch_id = world.create(lines(20))
    spare = world.upload(lines(1))
    until(lambda: len(engine.in_flight) >= 8)
    world.store.max_bytes = 100
    until(lambda: not engine.in_flight)
    assert world.store.batch(batch_id).status == "in_progress"
    assert "--max-disk-bytes" in until(lambda: world.batches.waiting_for(world.store.batch(batch_id)))
    with pytest.raises(ApiError, match="--max-disk-bytes") as refused:
        world.store.reserve(1)
    assert refused.value.status == 507
    world.store.delete_file(spare)
    world.store.max_bytes = 10**9
    until(lambda: engine.end(5) or world.store.batch(batch_id).has_ended)
    assert world.store.batch(batch_id).completed == 20
    assert world.batches.waiting_for(world.store.batch(batch_id)) is None


def test_files_are_listed_expire_and_are_not_deleted_under_a_batch(world):
    engine = HeldClient()
    world.start(engine)
    file_id = world.upload(lines(3))
    world.create(file_id)
    with pytest.raises(ApiError) as refused:
        world.store.delete_file(file_id)
    assert refused.value.status == 409
    fleeting = FileRecord(new_file_id(), 0, int(world.clock()), "x", expires_at=int(world.clock()) + 500)
    world.store.unfinished(fleeting.id).write_bytes(b"")
    world.store.add_file(fleeting)
    assert {each.id for each in world.store.files()} == {file_id, fleeting.id}
    world.offset = 600.0
    assert {each.id for each in world.store.files()} == {file_id}
    with pytest.raises(ApiError):
        world.store.file(fleeting.id)
    world.store.remove_expired()
    assert not world.store.content(fleeting.id).exists()
    with pytest.raises(ApiError):
        world.store.file("file-../../etc/passwd")


def test_two_servers_share_no_folder(world):
    world.start()
    with pytest.raises(ConfigError, match=rf"pid {os.getpid()}.*--data-dir"):
        Store(world.folder, 10**9)
    world.stop()
    world.start()


def test_a_server_takes_a_folder_over_once_the_other_has_given_it_back(tmp_path):
    model = SimpleNamespace(path=resolve("tiny"))
    serving = SimpleNamespace(options=ServerOptions(data_dir=str(tmp_path)), client=None, model=model)
    one, two = BatchService(serving, reader_of), BatchService(serving, reader_of)
    assert one.take_over()
    assert one.take_over()
    assert not two.take_over()
    one.stop()
    assert two.take_over()
    two.stop()


def test_leavings_of_a_killed_process_are_removed_and_unreadable_records_are_left(tmp_path):
    store = Store(tmp_path, 10**9)
    left = new_file_id()
    store.unfinished(left).write_bytes(b"half")
    store.content(new_file_id()).write_bytes(b"no record")
    (tmp_path / "files" / f".{left}.json").write_bytes(b"{")
    damaged = tmp_path / "files" / f"{new_file_id()}.json"
    damaged.write_bytes(b"{")
    (tmp_path / "batches" / new_batch_id()).mkdir()
    store.close()
    Store(tmp_path, 10**9).close()
    assert [path.name for path in (tmp_path / "files").iterdir()] == [damaged.name]
    assert list((tmp_path / "batches").iterdir()) == []


def test_the_check_of_a_file(tmp_path):
    path = tmp_path / "in.jsonl"

    def codes(data):
        path.write_bytes(data)
        found = check_lines(path, URL)
        return [(each["code"], each["line"], each["param"]) for each in found.errors], found.total

    def made(**changes):
        return json.dumps({**line(0), **changes}).encode() + b"\n"

    assert codes(made() + b"\n\n") == ([], 1)
    assert codes(b"") == ([("empty_file", None, None)], 0)
    assert codes(b"\x1f\x8b\x08whatever")[0] == [("invalid_file", None, None)]
    assert codes(b"\xff\xfe{\x00")[0] == [("invalid_file", None, None)]
    assert codes(made(custom_id=None))[0] == [("missing_required_parameter", 1, "custom_id")]
    assert codes(made(custom_id=[]))[0] == [("invalid_custom_id", 1, "custom_id")]
    assert codes(made(body=[1]))[0] == [("invalid_body", 1, "body")]
    assert codes(made(body={"stream": True}))[0] == [("invalid_body", 1, "body.stream")]
    assert codes(made(model="x"))[0] == [("invalid_field", 1, "model")]
    assert len(codes(b"[]\n" * 500)[0]) == MAX_ERRORS


def test_windows():
    assert [seconds_of(each) for each in ("24h", "10m", "90s", "30d")] == [86400, 600, 90, 30 * 86400]
    for wrong in ("", "24", "h", "0s", "31d", "1w", 24, None, "1h30m", "-1h"):
        with pytest.raises(InputError, match="completion_window is"):
            seconds_of(wrong)
    window = Window(0.0, 1000.0)
    assert not window.is_near(499.0, 5)
    assert window.is_near(501.0, 5)  # no row has ended
    for second in range(0, 101, 10):
        window.observe(float(second), second)  # one row ends each second
    assert window.rate == pytest.approx(1.0)
    assert not window.is_near(100.0, 449)
    assert window.is_near(100.0, 451)  # 451 rows take more than half of the time that is left
    for second in range(100, 901, 10):
        window.observe(float(second), 100)  # other jobs use the whole engine
    assert window.rate is None
    assert window.is_near(900.0, 1)
    assert window.is_over(1000.0)


def test_the_rate_is_that_of_the_last_minutes():
    window = Window(0.0, 10**6)
    for second in range(0, 1200, 1):
        window.observe(float(second), 10 * min(second, 600) + max(0, second - 600))
    assert window.rate == pytest.approx(1.0, rel=0.2)
    assert len(window._points) < 80


def test_results_are_the_same_however_often_they_are_written(tmp_path):
    source, journal = tmp_path / "in.jsonl", tmp_path / "results.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in lines(4)))
    good = '{"id": "batch_req_2", "custom_id": "id 2", "response": {}, "error": null}\n'
    bad = '{"id": "batch_req_0", "custom_id": "id 0", "response": null, "error": {"code": "x", "message": "y"}}\n'
    journal.write_text(good + bad + '{"id": "batch_req_1", "cust')  # the last line is torn
    for _ in range(2):
        written = write_results(
            *(source, journal, tmp_path / "o.jsonl", tmp_path / "e.jsonl", "batch_expired"),
            lambda target: target.with_suffix(".new"),
        )
        assert (written.completed, written.failed) == (1, 3)
        assert (tmp_path / "o.jsonl").read_text() == good
        errors = [json.loads(each) for each in (tmp_path / "e.jsonl").read_text().splitlines()]
        assert [each["custom_id"] for each in errors] == ["id 0", "id 1", "id 3"]
    assert list(tmp_path.glob("*.new")) == []


def test_fields_of_callers():
    assert expiry_of(None) is None
    assert expiry_of({"anchor": "created_at", "seconds": 3600}) == 3600
    for wrong in ({"anchor": "x", "seconds": 3600}, {"seconds": 3600}, 5, {"anchor": "created_at", "seconds": 1}):
        with pytest.raises(InputError, match="expires_after"):
            expiry_of(wrong)
    assert metadata_of({"a": "b"}) == {"a": "b"}
    for wrong in ([], {"a": 1}, {"a" * 65: "b"}, {"a": "b" * 513}, {str(i): "" for i in range(17)}):
        with pytest.raises(InputError, match="metadata"):
            metadata_of(wrong)
    assert safe_name("../../etc/pass\r\nwd") == "passwd"
    assert safe_name('C:\\x\\a "b".jsonl') == "a b.jsonl"
    assert safe_name("..") == "file.jsonl"
    assert len(safe_name("x" * 999)) == 200


def test_a_batch_whose_input_has_vanished_fails(world):
    held = HeldClient()
    world.start(held)
    batch_id = world.create(lines(20))
    world.wait(batch_id, "in_progress")
    until(lambda: held.seen)  # the job has opened its input
    world.store.content(world.store.batch(batch_id).input_file_id).unlink()
    world.stop()
    world.start()
    batch = world.wait(batch_id, "failed")
    assert f"{batch.input_file_id}.jsonl" in batch.errors[0]["message"]  # the file vanished before or while it was read
    assert str(world.folder) not in batch.errors[0]["message"]


def test_a_cancelled_batch_whose_input_has_vanished_ends(world, monkeypatch):
    real = runner_module.write_results

    def write_without_input(source, *rest):  # before this, the job may reach the end of its input at any moment
        source.unlink()
        return real(source, *rest)

    monkeypatch.setattr(runner_module, "write_results", write_without_input)
    world.start(HeldClient())
    batch_id = world.create(lines(20))
    world.wait(batch_id, "in_progress")
    world.batches.cancel(batch_id)
    assert world.wait(batch_id, "cancelled").failed == 0


def test_a_full_disk_ends_no_batch(world, monkeypatch):
    monkeypatch.setattr(runner_module, "_PAUSE_S", 1e9)
    real, calls = runner_module.run, []

    def full(*args, **options):
        calls.append(1)
        if len(calls) == 1:
            full = OutputError("write failed")
            full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
            raise OutputError("write failed") from full
        return real(*args, **options)

    monkeypatch.setattr(runner_module, "run", full)
    world.start()
    batch_id = world.create(lines(5))
    waits = until(lambda: world.batches.waiting_for(world.store.batch(batch_id)))
    assert waits == "disk: No space left on device"
    world.batches._paused_until.clear()
    assert world.wait(batch_id).completed == 5
    assert len(calls) == 2


def test_a_batch_that_is_finalizing_cannot_be_cancelled_and_too_many_are_refused(world, monkeypatch):
    world.start(HeldClient())
    batch_id = world.create(lines(3))
    world.wait(batch_id, "in_progress")
    world.store.keep_counts(replace(world.store.batch(batch_id), status="finalizing"))
    with pytest.raises(ApiError, match="is finalizing"):
        world.batches.cancel(batch_id)
    monkeypatch.setattr(runner_module, "MOST_WAITING", 1)
    with pytest.raises(ApiError, match="have not ended") as caught:
        world.create(lines(1))
    assert caught.value.status == 429


def test_an_input_that_expires_stays_while_a_batch_reads_it_and_others_cannot_read_the_folder(world):
    world.start(HeldClient())
    batch_id = world.create(lines(3))
    file_id = world.store.batch(batch_id).input_file_id
    world.store.add_file(replace(world.store.file(file_id), expires_at=1))
    world.store.remove_expired()
    assert world.store.content(file_id).exists()
    for path in (world.folder, world.folder / "files", world.folder / "batches"):
        assert path.stat().st_mode & 0o077 == 0
