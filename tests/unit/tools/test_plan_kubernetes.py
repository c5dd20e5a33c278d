"""The patch of `llamabatch plan --kubernetes`, from plans of made-up machines."""

import shutil
from types import SimpleNamespace

import pytest

from llamabatch.gguf.resolve import resolve
from llamabatch.planning.memory import MIB, PROCESS_BYTES, GpuNeed, Memory
from llamabatch.planning.nvml import Gpu
from llamabatch.tools.plan import kubernetes
from llamabatch.tools.plan.kubernetes import model_in_pod, patch, variables, yaml


def report(memory=None, in_children=False, gpus=0, **config):
    memory = memory or Memory(weights=500 * MIB, kv_cache=300 * MIB, compute=100 * MIB)
    given = {"strategy": "batched", "instances": 1, "n_slots": 8, "n_ctx": 4096, "kv": "split", "kv_cells": 0}
    given["cache_ram"] = 0
    options = SimpleNamespace(**{**given, "n_threads": 4, "n_threads_batch": 6, **config})
    peak = memory.together(options.instances, children=in_children)
    requested = SimpleNamespace(config=options, memory=memory, peak_bytes=peak, in_children=in_children)
    machine = SimpleNamespace(gpus=[Gpu("a GPU", 2**34, 2**34)] * gpus)
    return SimpleNamespace(requested=requested, memory=memory, machine=machine, model="a model")


def limits(report):
    value = patch(report, {})[0]["value"]
    assert value["requests"] == value["limits"]
    return value["limits"]


def test_memory_is_that_of_the_engine_its_process_and_the_server():
    around = kubernetes.SERVER_BYTES + kubernetes.BODIES_BYTES
    wanted = int((900 * MIB + PROCESS_BYTES) * 1.05) + around
    assert limits(report())["memory"] == f"{-(-wanted // MIB)}Mi"


def test_the_context_for_embeddings_counts_beside_that_for_texts():
    both = Memory(weights=500 * MIB, kv_cache=300 * MIB, compute=100 * MIB, embeddings=200 * MIB)
    alone = Memory(weights=500 * MIB, kv_cache=0, compute=200 * MIB, embeddings=200 * MIB)
    mebibytes = {name: int(limits(report(each))["memory"][:-2]) for name, each in (("both", both), ("alone", alone))}
    assert mebibytes["both"] - int(limits(report())["memory"][:-2]) == pytest.approx(210, abs=1)
    assert mebibytes["both"] - mebibytes["alone"] == pytest.approx(1.05 * 400, abs=1)


def test_each_engine_has_its_threads():
    assert limits(report())["cpu"] == "6"
    assert limits(report(instances=3, n_threads=2, n_threads_batch=2))["cpu"] == "6"


@pytest.mark.parametrize(
    ("gpus", "strategy", "instances", "wanted"),
    [(0, "batched", 1, None), (2, "batched", 1, "2"), (2, "batched", 3, "2"), (4, "multi-instance", 2, "4"),
     (4, "multi-instance", 4, "4")],
)  # fmt: skip
def test_gpus(gpus, strategy, instances, wanted):
    need = tuple(GpuNeed(number, MIB, MIB, MIB) for number in range(min(2, gpus)))
    made = report(
        Memory(1, 1, 1, gpus=need), strategy == "multi-instance", gpus, strategy=strategy, instances=instances
    )
    assert limits(made).get("nvidia.com/gpu") == wanted


def test_bodies_are_those_that_the_server_lets_in():
    pytest.importorskip("starlette")
    from llamabatch.server.options import ServerOptions

    assert 4 * ServerOptions().max_bodies_bytes == kubernetes.BODIES_BYTES


def test_options_become_texts():
    found = variables(
        report(kv="unified", kv_cells=2048), {"tensor_split": (3.0, 1.0), "use_mmap": False, "n_slots": "auto"}
    )
    assert found["LLAMABATCH_TENSOR_SPLIT"] == "3.0,1.0"
    assert found["LLAMABATCH_USE_MMAP"] == "false"
    assert found["LLAMABATCH_N_SLOTS"] == "8"
    assert found["LLAMABATCH_KV_CELLS"] == "2048"
    assert "LLAMABATCH_KV_CELLS" not in variables(report(), {})


def test_a_patch_names_the_model_that_its_memory_is_for(tmp_path):
    shutil.copy(resolve("tiny"), tmp_path / "other.gguf")
    assert model_in_pod("tiny") == "tiny"
    assert model_in_pod(str(tmp_path / "other.gguf")) == "/models/other.gguf"


def test_a_comment_says_how_much_of_the_memory_is_for_prefixes():
    assert "--cache-ram" not in yaml([], report())
    assert "# --cache-ram: 192 MiB of the memory, for prefixes" in yaml([], report(cache_ram=192))
    told = yaml([], report(cache_ram=8192, in_children=True))
    assert "# --cache-ram: 8192 MiB of each engine's memory" in told
    assert max(map(len, told.splitlines())) <= 80


def test_a_strange_name_stays_in_its_comment():
    made = report()
    made.model = "a\nb: [\u2028"
    loads = pytest.importorskip("yaml").safe_load
    assert loads(yaml(patch(made, {}), made)) == patch(made, {})
