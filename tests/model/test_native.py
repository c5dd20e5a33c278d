"""The native library that is installed here."""

import importlib.util
import os
import platform
import subprocess
import sys
from random import Random

import numpy as np
import pytest

from llamabatch import EngineConfig
from llamabatch.engine.resolve_config import plan
from llamabatch.errors import SetupError
from llamabatch.llama import abi_check, build_info, extra_buffers, library, log
from llamabatch.llama.batch import Batch
from llamabatch.llama.context import Context
from llamabatch.llama.environment import environment_defaults, is_mapped
from llamabatch.llama.model import Model
from llamabatch.tools import doctor
from llamabatch.tools.synth import Shape, write_model
from llamabatch.utils import paths


def run_child(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120, **options
    )


_SPINS = """
import ctypes, logging, sys
for path in sys.argv[1:]:
    ctypes.CDLL(path)
logging.basicConfig(level=logging.DEBUG)
from llamabatch import LLM
with LLM("tiny", n_ctx=128, n_slots=2, n_gpu_layers=0) as llm:
    print(llm.generate("Once")[0].error)
"""


@pytest.mark.skipif(
    not (library.uses_libgomp() and is_mapped("libgomp.so")),
    reason="this build of llama.cpp does not wait with libgomp",
)
@pytest.mark.parametrize("is_late", [False, True])
def test_nothing_of_ours_brings_libgomp_before_its_variables_are_set(is_late):
    """libgomp's variables are set before it is loaded. Otherwise threads spin for milliseconds at each barrier, and are
    very slow beside a busy process."""
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = run_child("-c", _SPINS, *(["libgomp.so.1"] if is_late else []), env=plain)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
    assert ("GOMP_SPINCOUNT comes too late" in done.stderr) == is_late


def test_a_quantised_model_runs_with_the_extra_buffers_on():
    """On a machine with AMX, a stock build of GCC 11 or 12 crashes here (see native_patches/0001)."""
    done = run_child("-m", "llamabatch.llama.probe", str(paths.bundled_model()))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_verdict_is_that_of_the_probe():
    assert library.extra_bufts_safe() is True


def test_load_gives_the_same_module_again():
    assert library.load() is library.load(1)


def test_what_is_loaded_is_told():
    info = library.library_info()
    assert info.binding_version.startswith("0.3.")
    assert any("llama" in path.name for path in info.libraries)
    assert info.max_parallel_sequences >= 16
    assert any(device.kind == "cpu" for device in info.devices)
    assert " = 1" in info.system_info


def test_the_patched_build_names_its_patches():
    marker = build_info.build_marker(library.load())
    if marker is None:
        pytest.skip("a stock build of llama-cpp-python")
    assert extra_buffers.PATCH in marker["patches"]
    named = marker["version"] if library.load().__name__ == "llamabatch_llama._binding" else None
    assert marker["key"][:8] in (named or library.library_info().binding_version)


def test_a_failed_load_leaves_its_reason_and_no_noise(tmp_path, capfd):
    llama = library.load()
    log.recent_complaints()
    assert not llama.llama_model_load_from_file(bytes(tmp_path / "none.gguf"), llama.llama_model_default_params())
    assert any("none.gguf" in line for line in log.recent_complaints())
    assert capfd.readouterr() == ("", "")


def test_the_environment_is_set_while_libgomp_is_loaded(monkeypatch):
    """OMP_DISPLAY_ENV makes libgomp print what it read."""
    monkeypatch.setenv("OMP_DISPLAY_ENV", "verbose")
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    code = (
        "import os; from llamabatch.llama import library; assert not library.is_mapped('libgomp.so');"
        "library.load(1); print(os.environ.get('GOMP_SPINCOUNT'), os.environ['GGML_NO_BACKTRACE'],"
        "library.is_mapped('libgomp.so'))"
    )
    done = run_child("-c", code)
    *_, after, _, gomp = ("", *done.stdout.split())
    assert after == "None"
    if gomp == "True":
        assert f"GOMP_SPINCOUNT = '{environment_defaults(1)['GOMP_SPINCOUNT']}'" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="only our own binding is installed")
def test_a_callback_of_the_program_stays():
    code = (
        "import ctypes, llama_cpp; from llamabatch.llama import library; lines = [];\n"
        "own = llama_cpp.llama_log_callback(lambda level, text, data: lines.append(text))\n"
        "llama_cpp.llama_log_set(own, ctypes.c_void_p(0)); library.load()\n"
        "llama_cpp.llama_model_load_from_file(b'none.gguf', llama_cpp.llama_model_default_params()); print(len(lines))"
    )
    assert int(run_child("-c", code).stdout) > 0


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="only our own binding is installed")
def test_a_log_line_at_exit_does_no_harm():
    code = (
        "import atexit, llama_cpp; from llamabatch.llama import library\n"
        "def last(): llama_cpp.llama_model_load_from_file(b'none.gguf', llama_cpp.llama_model_default_params())\n"
        "atexit.register(last); library.load()"
    )
    done = run_child("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="the trick is one of x86-64")
@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_a_struct_of_another_size_is_noticed(change, monkeypatch):
    llama = library.load()
    fields = list(llama.llama_context_params._fields_)
    fields = [*fields, ("another", fields[-1][1])] if change == "longer" else fields[:-1]
    struct = type("llama_context_params", (llama.llama_context_params.__base__,), {"_fields_": fields})
    monkeypatch.setattr(llama, "llama_context_params", struct)
    with pytest.raises(SetupError, match="not as large"):
        abi_check.check_layout(llama)


def test_the_doctor_finds_nothing_that_keeps_llamabatch_from_working():
    report = doctor.examine()
    assert report.ok, [check for check in report.checks if check.status is doctor.Status.ERROR]


HOST_PATCH = "0005-host-work-of-a-step.patch"

COPY_PATCH = "0013-copies-of-used-cells.patch"


def patches():
    return (build_info.build_marker(library.load()) or {}).get("patches", {})


_FAULTS = """
import resource
from llamabatch.llama import library
from llamabatch.utils import paths
llama = library.load()
model = llama.llama_model_load_from_file(str(paths.bundled_model()).encode(), llama.llama_model_default_params())
params = llama.llama_context_default_params()
params.n_ctx, params.n_seq_max, params.n_threads_batch, params.n_outputs_max = 32 * 256, 32, 1, 32
context = llama.llama_init_from_model(model, params)
batch = llama.llama_batch_init(32, 0, 1)
batch.n_tokens = 32
def step(position):
    for row in range(32):
        batch.token[row], batch.pos[row], batch.logits[row] = 5 + row, position, 1
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, row
    assert llama.llama_decode(context, batch) == 0
for position in range(80):  # cells take their memory when they are used
    step(position)
llama.llama_memory_clear(llama.llama_get_memory(context), False)
for position in range(80):
    if position == 40:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(position)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux and glibc do")
@pytest.mark.skipif(HOST_PATCH not in patches(), reason="llama.cpp is not the build with this patch")
def test_a_step_asks_the_system_for_no_memory():
    """Without native_patches/0005, each of these 40 steps allocates 400 KB again, which causes 150 page faults."""
    done = run_child("-c", _FAULTS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 400


_CELLS = """
import resource
from llamabatch import EngineConfig; from llamabatch.utils import paths
from llamabatch.llama.batch import Batch
from llamabatch.llama.context import Context
from llamabatch.llama.library import load
from llamabatch.llama.model import Model
from llamabatch.engine.resolve_config import plan

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

def use(slots):
    for slot in slots:
        for start in range(0, 480, 16):
            assert not context.decode(batch.fill_rows([5] * 16, list(range(start, start + 16)), [slot] * 16))
    return context.logits(16)[-1].copy()

config = plan(EngineConfig("tiny", n_slots=128, n_ctx=512, n_gpu_layers=0), paths.bundled_model()).config
model, lib = Model(paths.bundled_model(), config), load()
before = resident()
context, batch = Context(model, config, 128), Batch(lib, config.n_batch)
empty = resident() - before
first = use(range(64))
used = resident() - before
lib.llama_memory_clear(lib.llama_get_memory(context.handle), True)
cleared = resident() - before
assert (use([0]) == first).all()
print(empty, used, cleared)
"""


@pytest.mark.skipif(not library.has_lazy_cells(), reason="llama.cpp is not the patched build")
def test_cells_take_memory_when_they_are_used_and_not_before():
    """native_patches/0009: there are 128 slots of 512 cells. The test fills 64, and llama.cpp then clears them."""
    done = run_child("-c", _CELLS)
    assert done.returncode == 0, done.stderr
    empty, used, cleared = map(float, done.stdout.split())
    assert empty < 16
    assert used - empty > 32
    assert cleared < empty + 16


_PAGES = """
import re, sys
from pathlib import Path
from llamabatch import LLM
from llamabatch.planning.memory import MIB

path = sys.argv[1]
with LLM(path, n_ctx=128, n_slots=1, n_threads=1, n_gpu_layers=0) as llm:
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    resident = {one: int(re.search(r"^Rss: +([0-9]+)", one, flags=re.MULTILINE)[1]) / 1024 for one in maps[1:]}
    of_file = sum(size for one, size in resident.items() if path in one.split("\\n")[0])
    huge = sum(size for one, size in resident.items() if re.search(r"^VmFlags:.* hg", one, flags=re.MULTILINE))
    print(of_file, llm.plan.memory.weights / MIB, llm.plan.memory.copies / MIB, huge)
"""


@pytest.mark.skipif(not library.drops_copied_pages(), reason="llama.cpp is not the patched build, or not on Linux")
@pytest.mark.skipif(not library.repack_features(), reason="this CPU has no layout of its own")
def test_what_was_copied_leaves_no_pages_of_the_file(tmp_path):
    """Without native_patches/0014, nearly the whole file would stay in memory beside the copies. With 0022, the copies
    ask for huge pages; whether the system gives them is not tested."""
    path = tmp_path / "model.gguf"
    size = write_model(Shape("qwen2", 4, 512, 2048, 8, 2, 64, 2048, 1024, 1e6, 1e-6, tied=False), path, "Q4_0")
    done = run_child("-c", _PAGES, str(path))
    assert done.returncode == 0, done.stderr
    resident, predicted, copies, huge = map(float, done.stdout.split())
    assert copies > 8
    assert huge > copies - 2 * 2 or not os.path.exists("/sys/kernel/mm/transparent_hugepage")  # both ends stay small
    assert predicted - 2 < resident < predicted + 2  # some pages contain parts of two tensors
    assert predicted < size / 2**20 - 0.9 * copies


_ADVICE = """
import re, sys
from pathlib import Path
from llamabatch import LLM
from llamabatch.gguf.header import read_header

path = Path(sys.argv[1])
header = read_header(path)
pieces = {tensor.name: header.data_start + tensor.offset for tensor in header.tensors}
with LLM(path, n_ctx=128, n_slots=1, n_threads=1, n_gpu_layers=0, extra_bufts=sys.argv[2]):
    for one in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        head = one.split("\\n")[0]
        if str(path) in head:
            start, end, offset = (int(each, 16) for each in re.match(r"(\\w+)-(\\w+) \\S+ (\\w+)", head).groups())
            is_random = " rr" in re.search(r"^VmFlags:.*", one, flags=re.MULTILINE)[0]
            for name, at in pieces.items():
                if offset <= at < offset + end - start:
                    print(name, is_random)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells of pages")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("extra_bufts", ["on", "off"])
def test_small_pieces_of_a_mapped_file_are_read_by_the_page(extra_bufts, tied, tmp_path):
    """If the kernel read up to 16 MiB around each page, each step in a small cgroup would read most of the file
    again."""
    path = tmp_path / "model.gguf"
    write_model(Shape("qwen2", 2, 512, 1024, 8, 2, 64, 2048, 1024, 1e6, 1e-6, tied=tied), path, "Q4_0")
    done = run_child("-c", _ADVICE, str(path), extra_bufts)
    assert done.returncode == 0, done.stderr
    found = {name: flag == "True" for name, flag in map(str.split, done.stdout.splitlines())}
    assert found["blk.0.attn_norm.weight"]
    assert found["blk.1.ffn_norm.weight"]
    if extra_bufts == "off":  # a tied model then computes logits with this tensor itself, not with a copy
        assert found["token_embd.weight"] is not tied
        assert not found["blk.1.ffn_up.weight"]


_COPIES = """
import resource
from llamabatch import EngineConfig; from llamabatch.utils import paths
from llamabatch.llama.batch import Batch
from llamabatch.llama.context import Context
from llamabatch.llama.library import load
from llamabatch.llama.model import Model
from llamabatch.engine.resolve_config import plan

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

options = dict(n_slots=32, n_ctx=2048, n_gpu_layers=0, n_threads=1, kv="split")
config = plan(EngineConfig("tiny", **options), paths.bundled_model()).config
model = Model(paths.bundled_model(), config)
context, batch = Context(model, config, 32), Batch(load(), config.n_batch)
assert not context.decode(batch.fill_rows([5] * 20, list(range(20)), [0] * 20))
assert not context.decode(batch.fill_rows([5] * 32, [20] + [0] * 31, list(range(32))))
before = resident()
for slot in range(1, 32):
    context.copy_prefix(0, slot, 16)
assert not context.decode(batch.fill_rows([5] * 31, [16] * 31, list(range(1, 32))))
print(resident() - before)
"""


@pytest.mark.skipif(not library.has_lazy_cells(), reason="cells take memory before they are used")
@pytest.mark.skipif(COPY_PATCH not in patches(), reason="llama.cpp is not the build with this patch")
def test_a_copied_prefix_takes_the_memory_of_its_cells_alone():
    """Without native_patches/0013, a prefix of 16 tokens in 31 slots of 2,048 cells takes more than 140 MiB."""
    done = run_child("-c", _COPIES)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 16


@pytest.mark.parametrize(("kv", "flash_attn"), [("split", "on"), ("split", "off"), ("unified", "on")])
def test_chains_of_copies_and_cuts_leave_each_slot_with_its_own_tokens(kv, flash_attn):  # off: V is transposed
    """The copies of a step are made in order, before its pass. A slot may be a source, then a target, then be cut."""
    n_slots, n_cells, random = 6, 256, Random(12)
    cells = {} if kv == "split" else {"kv_cells": n_slots * n_cells}
    config = EngineConfig(
        "tiny", n_slots=n_slots, n_ctx=n_cells, n_gpu_layers=0, n_threads=1, kv=kv, flash_attn=flash_attn, **cells
    )
    config = plan(config, paths.bundled_model()).config
    model = Model(paths.bundled_model(), config)
    context, fresh = Context(model, config, n_slots), Context(model, config, n_slots)
    batch = Batch(library.load(), config.n_batch)

    def compute(where, slot, tokens, start):
        rows = range(start, start + len(tokens))
        assert not where.decode(batch.fill_rows(tokens, list(rows), [slot] * len(tokens)))

    def last(where, slots, held):
        assert not where.decode(batch.fill_rows([9] * len(slots), [len(held[slot]) for slot in slots], slots))
        return where.logits(len(slots)).copy()

    try:
        held = [[] for _ in range(n_slots)]
        for _ in range(20):
            for slot in random.sample(range(n_slots), 2):
                context.clear(slot)
                held[slot] = [random.randrange(16, 2000) for _ in range(random.randrange(1, 17))]
                compute(context, slot, held[slot], 0)
            for _ in range(random.randrange(4, 14)):
                source, target = random.sample(range(n_slots), 2)
                if held[source] and random.random() < 0.8:
                    held[target] = held[source][: random.randrange(1, len(held[source]) + 1)]
                    context.copy_prefix(source, target, len(held[target]))
                elif len(held[target]) > 1:
                    held[target] = held[target][: random.randrange(1, len(held[target]))]
                    context.clear(target, len(held[target]))
            slots = [slot for slot in range(n_slots) if held[slot]]
            found = last(context, slots, held)
            for slot in slots:
                fresh.clear(slot)
                compute(fresh, slot, held[slot], 0)
            # in a unified cache, cells have another order, so an activation may be rounded to a neighbouring value
            np.testing.assert_allclose(found, last(fresh, slots, held), atol=1e-4 if kv == "split" else 0.2)
            for slot in slots:
                context.clear(slot, len(held[slot]))
    finally:
        context.close()
        fresh.close()
        model.close()
