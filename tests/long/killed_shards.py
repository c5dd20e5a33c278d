"""A job of four shards on a Ray cluster of two nodes. Its driver, tasks and nodes are killed at random moments."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

HOLDS = (
    "kill -9 at 5 random moments of a job in 4 shards on Ray, 50 in 10 jobs, of the driver, a task or a node: the "
    "shards together are byte-equal to the output of one process without a kill, and nothing else is left beside them"
)
TOTAL = 10
QUICK = 1
NEEDS = "ray"

KILLS = 5
N_ROWS = 600
N_SHARDS = 4
KINDS = ("driver", "task", "node")
_PATIENCE_S = 240.0
_MOST_UP_S = 4.0  # seconds from the first task to a kill
# With one slot and no prefix cache, a text depends neither on other rows in the batch nor on earlier rows. Therefore
# bytes can be compared.
_OPTIONS = ["-n", "24", "-P", "ignore_eos=true", "-t", "0.8", "--seed", "5", "--n-threads", "1", "--n-slots", "1"]
_OPTIONS += ["--no-cache-prefix"]


def case(number: int, folder: Path) -> None:
    """Kills a job KILLS times. If the job is done before, another job is next. Even numbers join the parts."""
    rng = random.Random(number)
    source, whole = folder / "in.jsonl", folder / "whole.jsonl"
    source.write_text("".join(json.dumps({"id": f"row {i}", "prompt": f"Day {i}:"}) + "\n" for i in range(N_ROWS)))
    subprocess.run(_command(source, whole), capture_output=True, timeout=_PATIENCE_S, check=True)
    shared = folder / "shared"
    shared.mkdir()
    out = shared / ("out.jsonl" if number % 2 == 0 else "out-{shard}.jsonl")
    with _cluster() as cluster, (folder / "log.txt").open("w+") as log:
        command = [*_command(source, out), "--ray", cluster.address, "--shards", str(N_SHARDS)]
        driver, kinds = None, list(KINDS[:2] + KINDS[number % 2 :])  # each kind at least once
        kinds += [rng.choice(KINDS) for _ in range(KILLS - len(kinds))]
        rng.shuffle(kinds)
        while kinds:
            if driver is None:
                driver = subprocess.Popen(command, stdout=log, stderr=log)
            _wait_for_task(driver)
            time.sleep(rng.uniform(0.0, _MOST_UP_S))
            if driver.poll() is not None:  # done before the kill: the next job
                assert driver.returncode == 0, _told(log)
                _compare(out, whole)
                _remove(shared)
                driver = None
                continue
            kind = kinds.pop()
            if kind == "driver":
                driver.kill()
                driver.wait()
                driver = None
            elif kind == "task":
                if tasks := _tasks():
                    _kill(rng.choice(tasks))
                else:
                    kinds.append(kind)
            else:
                cluster.replace(rng.randrange(2))
        if driver is None:
            driver = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            code = driver.wait(_PATIENCE_S)
        finally:
            driver.kill()
            driver.wait()
        assert code == 0, _told(log)
    _compare(out, whole)


def _command(source: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "llamabatch", "run", str(source), str(out), *_OPTIONS]


class _Cluster:
    """A Ray cluster: a head without CPUs, to which drivers connect, and two nodes with one CPU each."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        faster = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}
        head = {"num_cpus": 0, "object_store_memory": 80_000_000, "include_dashboard": False, "temp_dir": folder}
        self._cluster: Any = Cluster(
            initialize_head=True, head_node_args={**head, "_system_config": {**faster, "health_check_timeout_ms": 1000}}
        )
        self.address: str = self._cluster.address
        self._nodes = [self._add(), self._add()]

    def _add(self) -> Any:
        return self._cluster.add_node(num_cpus=1, object_store_memory=80_000_000, include_dashboard=False)

    def replace(self, number: int) -> None:
        """Kills a node, and starts another one."""
        self._cluster.remove_node(self._nodes[number], allow_graceful=False)
        self._nodes[number] = self._add()

    def close(self) -> None:
        self._cluster.shutdown()


@contextlib.contextmanager
def _cluster() -> Iterator[_Cluster]:
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:  # short path, for Ray's sockets
        before = os.environ.get("RAY_USAGE_STATS_ENABLED")
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        cluster = _Cluster(folder)
        try:
            yield cluster
        finally:
            children = psutil.Process().children(recursive=True)
            cluster.close()
            gone = psutil.wait_procs(children, timeout=30)[1]
            for process in gone:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if before is None:
                del os.environ["RAY_USAGE_STATS_ENABLED"]
            else:
                os.environ["RAY_USAGE_STATS_ENABLED"] = before


def _wait_for_task(driver: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _PATIENCE_S
    while driver.poll() is None and not _tasks():
        assert time.monotonic() < until, "no task of the job has begun"
        time.sleep(0.05)


def _tasks() -> list[psutil.Process]:
    """Returns the processes of this cluster that run a shard."""
    return [each for each in psutil.Process().children(recursive=True) if "llamabatch shard" in _name(each)]


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _parts(out: Path) -> list[Path]:
    from llamabatch.integrations.ray_parts import part_of_shard

    return [part_of_shard(out, k, N_SHARDS) for k in range(1, N_SHARDS + 1)]


def _compare(out: Path, whole: Path) -> None:
    """Checks that each part has the wanted bytes, and that there are no files but those of the job."""
    parts, wanted = _parts(out), whole.read_bytes().splitlines(keepends=True)
    assert len(wanted) == N_ROWS
    for k, part in enumerate(parts):
        assert part.read_bytes() == b"".join(wanted[k::N_SHARDS]), f"{part.name} differs"
    joined = [out] if "{shard}" not in out.name else []
    for each in joined:
        assert each.read_bytes() == whole.read_bytes()
    kept = {each.with_name(each.name + suffix) for each in (*parts, *joined) for suffix in ("", ".job.json")}
    there = {path for path in out.parent.rglob("*") if path.is_file()}
    assert there == kept, f"{sorted(path.name for path in there ^ kept)}"


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def _told(log: Any) -> str:
    """Returns the end of the drivers' output, without Ray's own lines."""
    log.seek(0)
    lines = [line for line in log.read().splitlines() if line.strip() and not line.startswith((" ", "\t", "\x1b"))]
    return "\n".join(lines)[-500:]
