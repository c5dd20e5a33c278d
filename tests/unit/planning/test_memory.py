"""The memory arithmetic without a library: weights by tensor, engines together, limits, GPUs."""

import math
import sys
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError, MemoryPlanError
from llamabatch.gguf.reader import TENSOR_TYPES, TensorInfo
from llamabatch.planning import machine as limits
from llamabatch.planning.capacity import resolve
from llamabatch.planning.compute_buffers import Widths, graph_bytes, input_bytes, work_bytes
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import MIB, PROCESS_BYTES, memory
from llamabatch.planning.model_facts import Layer, ModelFacts
from llamabatch.planning.nvml import Gpu, gpus
from llamabatch.planning.weights import in_files, weights
from tests.unit.configs import resolved

GIB = 2**30
NUMBERS = {name: number for number, (name, *_) in TENSOR_TYPES.items()}


def tensor(name, kind, *dims):
    _, block, n_bytes = TENSOR_TYPES[NUMBERS[kind]]
    return TensorInfo(name, dims, NUMBERS[kind], 0, math.prod(dims) // block * n_bytes)


@pytest.mark.parametrize(
    ("kind", "dims", "features", "share"),
    [
        ("Q8_0", (512, 64), {"avx2", "avx512"}, 0),  # x86 has kernels for it uncopied, without native_patches/0006
        ("Q8_0", (512, 64), {"avx2", "rows"}, 1),
        ("Q8_0", (512, 60), {"avx2", "rows"}, 0),
        ("Q8_0", (512, 64), {"neon"}, 1),
        ("Q8_0", (512, 64), {"amx", "avx2"}, 38 / 34),  # AMX needs 4 bytes more for each block
        ("Q4_K", (512, 64), {"avx2"}, 1),
        ("Q4_K", (512, 62), {"avx2"}, 0),  # 62 is no multiple of eight
        ("Q4_K", (512, 64), {"amx", "avx2"}, 148 / 144),
        ("Q4_K", (512, 48), {"amx", "avx2"}, 1),  # AMX needs a multiple of 32, so the next buffer type copies it
        ("Q6_K", (512, 64), {"avx2", "avx512"}, 0),
        ("Q6_K", (512, 64), {"avx2", "avx512", "rows"}, 0),
        ("Q6_K", (512, 64), {"avx2", "avx512", "rows", "vnni512"}, 1),
        ("Q6_K", (512, 64, 4), {"avx2", "avx512", "rows", "vnni512"}, 0),  # experts
        ("Q8_0", (512, 64, 4), {"avx2", "rows"}, 1),
        ("Q4_K", (512, 64), {"amx", "avx2", "rows", "wide"}, 1),  # chosen before AMX; as many bytes
        ("Q8_0", (512, 64, 4), {"amx", "avx2", "rows", "wide"}, 1),
        ("Q8_0", (512, 64), {"amx", "avx2", "rows", "wide"}, 1),  # tiles of sixteen
        ("Q4_0", (512, 48), {"amx", "avx2", "rows", "wide"}, 1),
        ("Q8_0", (512, 56), {"amx", "avx2", "rows", "wide"}, 1),  # tiles of eight
        ("Q5_K", (512, 64), {"avx2", "rows", "wide"}, 1),
        ("Q5_K", (512, 56), {"avx2", "rows", "wide"}, 0),  # 56 is no multiple of sixteen
        ("Q4_K", (512, 56), {"avx2", "rows", "wide"}, 1),  # Q4_K needs a multiple of eight
        ("Q6_K", (512, 64, 4), {"avx2", "rows", "wide"}, 1),
        *((kind, (512, 56), {"avx2", "rows", "wide8"}, 1) for kind in ("Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q6_K")),
        ("Q5_K", (512, 60), {"avx2", "rows", "wide8"}, 0),  # 60 is no multiple of eight
        ("Q8_0", (512, 56, 4), {"avx2", "rows", "wide8"}, 1),
        ("Q4_0", (512, 48), {"avx2", "rows", "wide", "vnni512"}, 1),
        *(("BF16", (columns, 48), {"avx2", "rows", "wide"}, copies) for columns, copies in ((528, 1), (520, 0))),
        *(("F16", (520, rows), {"avx2", "rows", "wide8"}, copies) for rows, copies in ((56, 1), (52, 0))),
        ("BF16", (512, 64, 4), {"avx2", "rows", "wide"}, 1),  # experts
        ("BF16", (512, 64), {"avx2", "rows"}, 0),
        ("F16", (512, 64), {"amx"}, 1),
        ("F32", (512, 64), {"amx", "avx2", "neon"}, 0),
        ("Q4_K", (512, 64), set(), 0),
        ("Q4_0", (512, 64, 4), {"avx2"}, 1),  # experts
        ("Q4_0", (512, 64, 4), {"amx"}, 0),
    ],
)
def test_which_tensors_are_copied(kind, dims, features, share):
    one = tensor(f"blk.0.ffn_up{'_exps' if len(dims) > 2 else ''}.weight", kind, *dims)
    assert weights([one], 1, frozenset(features)).copies[0] == pytest.approx(one.n_bytes * share)


def test_tensors_of_three_dimensions_that_are_no_experts_are_not_copied():
    """For example the heads of latent attention, which repack.cpp does not copy."""
    heads = tensor("blk.0.attn_k_b.weight", "Q8_0", 128, 512, 16)
    assert weights([heads], 1, frozenset({"avx2", "rows"})).copies == (0, 0)


def test_weights_by_layer():
    tensors = [
        tensor("token_embd.weight", "Q4_0", 64, 320),
        tensor("blk.0.attn_norm.weight", "F32", 64),
        tensor("blk.0.attn_q.weight", "Q4_0", 64, 64),
        tensor("blk.1.attn_q.weight", "Q4_0", 64, 128),
        tensor("output_norm.weight", "F32", 64),
    ]
    found = weights(tensors, 2, frozenset({"avx2"}))
    assert found.layers == (64 * 4 + 64 * 64 * 18 // 32, 128 * 64 * 18 // 32, 64 * 4)
    assert found.rest == tensors[0].n_bytes
    assert found.copies[2] == tensors[0].n_bytes  # the embedding also makes the logits
    untied = weights([*tensors, tensor("output.weight", "F32", 64, 320)], 2, frozenset({"avx2"}))
    assert untied.copies[2] == 0


LAYERS = tuple(Layer(128, 128) for _ in range(4))
TENSORS = tuple(tensor(f"blk.{n}.ffn_up.weight", "Q4_K", 1024, 4096) for n in range(4))
EMBEDDING, NORM = tensor("token_embd.weight", "F32", 1024, 255), tensor("output_norm.weight", "F32", 1024)


def laid_out(*tensors):
    """Returns the tensors with their offsets in a file that has them one after another."""
    starts = accumulate((each.n_bytes for each in tensors), initial=0)
    return tuple(replace(each, offset=start) for each, start in zip(tensors, starts, strict=False))


FACTS = ModelFacts(
    "m", 4 * TENSORS[0].n_bytes + MIB, 512, 512, 1024, 8, 1000, 8192, layers=LAYERS,
    tensors=laid_out(EMBEDDING, *TENSORS, NORM), widths=Widths(1024, 1000, 8, 1024, 256, 3 * 4096),
)  # fmt: skip
MACHINE = Machine(4, 8 * GIB, features=frozenset({"avx2"}), fast_attention=True)


def test_the_copy_is_counted_and_what_it_replaces_may_go():
    plan = resolve(EngineConfig("m", n_slots=2), FACTS, MACHINE)
    assert plan.memory.copies == plan.memory.reclaimable == 4 * TENSORS[0].n_bytes
    assert "9 MiB repacked copies" in plan.memory.describe()
    assert resolve(EngineConfig("m", n_slots=2, extra_bufts="off"), FACTS, MACHINE).memory.copies == 0
    read = resolve(EngineConfig("m", n_slots=2, use_mmap=False), FACTS, MACHINE).memory
    assert (read.weights, read.reclaimable) == (MIB, 0)
    assert plan.memory.loading == 0
    just = plan.total_bytes - plan.memory.reclaimable
    resolve(plan.config, FACTS, replace(MACHINE, available_bytes=just))
    with pytest.raises(MemoryPlanError, match="lower n_ctx"):
        resolve(plan.config, FACTS, replace(MACHINE, available_bytes=just - 1))


AVX2 = frozenset({"avx2"})


def test_the_file_stays_mapped_from_the_first_to_the_last_tensor_without_a_copy():
    copied, output = TENSORS[0], tensor("output.weight", "Q4_K", 1024, 256)
    here = (True, True)

    def found(*tensors, parts=(), features=AVX2, on_cpu=here):
        return in_files(laid_out(*tensors), parts, 1, features, on_cpu)[:3]

    n, e = copied.n_bytes, EMBEDDING.n_bytes
    kept = e + NORM.n_bytes
    assert found(EMBEDDING, copied, NORM) == (kept + n, kept, 0)
    assert found(copied, EMBEDDING, NORM) == (kept, kept, 0)  # an end of the file that is copied is unmapped
    assert found(output, EMBEDDING, NORM, copied) == (kept, kept, 0)
    assert found(EMBEDDING, copied, NORM, features=frozenset()) == (kept + n, kept + n, 0)
    assert found(EMBEDDING, NORM, copied, NORM, parts=(3, 1)) == (kept + NORM.n_bytes,) * 2 + (0,)
    assert found(EMBEDDING, NORM, copied, on_cpu=(False, False)) == (e, e, e)  # on a GPU
    tied = tensor("token_embd.weight", "Q4_K", 1024, 256)
    assert found(tied, copied, NORM) == (tied.n_bytes + n + NORM.n_bytes, tied.n_bytes + NORM.n_bytes, tied.n_bytes)
    assert found(tied, copied, NORM, output)[2] == 0


def test_an_embedding_that_also_makes_the_logits_is_kept_beside_its_copy():
    """This holds without mapping, too: the rows of the embedding are read from where the file was loaded."""
    tied = tensor("token_embd.weight", "Q4_K", 1024, 25600)
    facts = replace(
        FACTS, tensors=laid_out(tied, *TENSORS, NORM), features=AVX2, file_bytes=tied.n_bytes + 4 * TENSORS[0].n_bytes
    )
    read = memory(facts, resolved(flash_attn="on", use_mmap=False, n_ctx=1024, n_slots=4))
    assert (read.weights, read.copies) == (tied.n_bytes + NORM.n_bytes, tied.n_bytes + 4 * TENSORS[0].n_bytes)
    mapped = memory(facts, resolved(flash_attn="on", n_ctx=1024, n_slots=4))
    assert mapped.reclaimable == mapped.copies


def test_the_peak_may_be_while_the_model_is_loaded():
    output = tensor("output.weight", "Q4_K", 1024, 102400)
    tensors = laid_out(output, EMBEDDING, NORM, *TENSORS)
    facts = replace(FACTS, tensors=tensors, file_bytes=tensors[-1].offset + TENSORS[0].n_bytes)
    plan = resolve(EngineConfig("m", n_slots=1, n_ctx=256, cache_ram=0), facts, MACHINE)
    assert plan.memory.weights == EMBEDDING.n_bytes + NORM.n_bytes
    assert plan.memory.loading == output.n_bytes + 4 * TENSORS[0].n_bytes > plan.memory.own
    assert plan.peak_bytes == plan.memory.peak == plan.memory.shared + plan.memory.loading > plan.total_bytes
    resolve(plan.config, facts, replace(MACHINE, available_bytes=plan.total_bytes))  # the plan is not refused
    read = resolve(replace(plan.config, use_mmap=False), facts, MACHINE)
    assert (read.memory.loading, read.peak_bytes) == (0, read.total_bytes)


def test_an_embedding_on_a_gpu_between_tensors_in_use_keeps_its_pages():
    """Patch 0014 frees no page of the embedding, and llama.cpp unmaps only the two ends of a file."""
    first, last = (tensor(f"rope_factors_{name}.weight", "F32", 1024) for name in ("long", "short"))
    for tensors, n_bytes in (((first, EMBEDDING, last), EMBEDDING.n_bytes), ((EMBEDDING, first, last), 0)):
        laid = laid_out(*tensors)
        facts = replace(FACTS, tensors=laid, file_bytes=sum(each.n_bytes for each in laid), draft=None)
        placed = replace(facts, placed=(("token_embd.weight", 0),), drops_copied_pages=True)
        config = resolved(n_gpu_layers=1, n_slots=1, n_ctx=256)
        found = memory(placed, config, (1.0,))
        assert found.weights == first.n_bytes + last.n_bytes + n_bytes
        assert found.reclaimable == n_bytes


def test_the_copies_of_a_draft_model_are_counted():
    asked = EngineConfig("m", n_slots=2, speculate="draft", draft_model="d.gguf")
    with_copies = resolve(asked, replace(FACTS, draft=FACTS), MACHINE).memory
    without = resolve(asked, replace(FACTS, draft=FACTS), replace(MACHINE, features=frozenset())).memory
    assert with_copies.draft - without.draft == with_copies.copies == 4 * TENSORS[0].n_bytes


def test_pages_of_copied_weights_are_given_back_where_the_build_does():
    output = tensor("output.weight", "Q4_K", 1024, 102400)
    tensors = laid_out(EMBEDDING, output, *TENSORS, NORM)
    size = sum(each.n_bytes for each in tensors)
    facts, drops = replace(FACTS, tensors=tensors, file_bytes=size), replace(MACHINE, drops_copied_pages=True)
    config = EngineConfig("m", n_slots=1, n_ctx=256, cache_ram=0)
    kept, copied = resolve(config, facts, MACHINE), resolve(config, facts, drops)
    assert kept.memory.weights == kept.memory.file == copied.memory.file == size
    assert copied.memory.weights == EMBEDDING.n_bytes + NORM.n_bytes
    assert (copied.memory.copies, copied.memory.reclaimable) == (output.n_bytes + 4 * TENSORS[0].n_bytes, 0)
    assert copied.memory.loading == output.n_bytes  # a tensor's copy is made before its pages are freed
    assert copied.address_space == kept.address_space  # freed pages still count as address space
    on_gpu = resolve(replace(config, n_gpu_layers=-1), facts, replace(drops, n_gpus=1, gpus=(Gpu(0, GIB, GIB),)))
    assert on_gpu.memory.copies == 0
    assert on_gpu.memory.loading == size - on_gpu.memory.weights  # the whole file is read first
    locked = resolve(replace(config, use_mlock=True), facts, drops)
    assert locked.memory.weights == size


def test_in_a_model_of_one_layer_only_outputs_reach_the_feed_forward_network():
    """The buffer is reserved for all tokens. Pages that are never written take no memory, but count for RLIMIT_DATA."""
    one = replace(FACTS, layers=LAYERS[:1])
    sizes = [memory(facts, resolved(flash_attn="on", n_ctx=512, n_slots=4)) for facts in (one, FACTS)]
    assert sizes[0].compute < sizes[1].compute / 2
    assert sizes[0].data + 3 * (sizes[1].kv_cache // 4) == sizes[1].data


def test_the_lists_of_cells_are_counted_beside_the_cells():
    """llama.cpp's lists, and token numbers: a twelfth of all memory for the bundled model with 32 slots."""

    def compute(**options):
        return memory(FACTS, resolved(flash_attn="on", n_ctx=1000, **options)).compute

    logits = 4 * FACTS.n_vocab
    assert compute(n_slots=5) - compute(n_slots=4) == 1024 * 200 + logits
    shared = {"kv": "unified", "kv_cells": 2048}
    assert compute(n_slots=5, **shared) - compute(n_slots=4, **shared) == logits
    stateful = replace(FACTS, k_values=0, v_values=0)  # a model without cells
    assert memory(stateful, resolved(n_slots=5)).compute - memory(stateful, resolved(n_slots=4)).compute == logits


def test_engines_of_one_process_share_and_children_map():
    one = memory(FACTS, resolved(flash_attn="on", n_ctx=1024, n_slots=4))
    assert one.together(3, children=False) == one.total + 2 * (one.kv_cache + one.compute)
    assert one.together(3, children=True) == one.weights + 3 * (one.total - one.weights + PROCESS_BYTES)
    assert one.together(3, children=True, mapped=False) == 3 * (one.total + PROCESS_BYTES)


def test_a_pass_is_as_wide_as_its_widest_place():
    widths = Widths(n_embd=100, n_vocab=1000, n_head=8, queries=100, keys=20, feed_forward=900)
    by_network = graph_bytes(widths, 512, 256, 1, flash=True)
    assert by_network == 512 * 256 * 2 + 512 * (4 * 100 + 900) * 4
    assert graph_bytes(widths, 512, 256, 512, flash=True) == 512 * 256 * 2 + 512 * (1000 + 400) * 4
    scores = 512 * 4096 * 8 + 512 * (300 + 200 + 20)
    assert graph_bytes(widths, 512, 4096, 1, flash=False) == 512 * 4096 * 4 + 4 * scores


@pytest.mark.parametrize(
    ("kind", "reported"),
    [
        ({}, 6.14),  # without the input embeddings, which the CPU's buffer also contains
        ({"follows": True}, 5.51),
        ({"follows": True, "one_layer": True}, 5.00),
        ({"follows": True, "one_layer": True, "n_cells": 2048}, 5.13),
        ({"follows": True, "n_fed": 4}, 3.64),  # the last layer only
        ({"follows": True, "n_fed": 4, "apart": True}, 7.04),
        ({"follows": True, "one_layer": True, "apart": True}, 9.54),
        ({"one_layer": True, "apart": True}, 9.54),
    ],
)
def test_buffers_of_the_layers_of_one_gpu_are_those_that_llama_cpp_reports(kind, reported):
    """`reported` is in MiB, on RPC devices with a model of eight layers, 512 tokens a pass and 512 cells."""
    widths = Widths(n_embd=320, n_vocab=4096, n_head=5, queries=320, keys=640, feed_forward=1920)
    n_cells = kind.pop("n_cells", 512)
    entering = 3 * input_bytes(widths, 512, n_cells, True) if "apart" in kind else -512 * 320 * 4
    found = graph_bytes(widths, 512, n_cells, 0, True, **kind) + entering
    assert found / MIB == pytest.approx(reported, abs=0.05)


# --- limits -------------------------------------------------------------------------------------------------------


def test_address_space_and_data_are_limits_of_their_own():
    config = EngineConfig("m", n_slots=2, n_ctx=1024, kv="split", cache_ram=0)
    plan = resolve(config, FACTS, MACHINE)
    with pytest.raises(MemoryPlanError, match=r"RLIMIT_AS leaves .*: .* weights .* = .* MiB, and "):
        resolve(config, FACTS, replace(MACHINE, address_space=plan.address_space - 1))
    resolve(config, FACTS, replace(MACHINE, address_space=plan.address_space))
    with pytest.raises(MemoryPlanError, match=r"RLIMIT_DATA leaves .* weights .* = "):
        resolve(config, FACTS, replace(MACHINE, data_bytes=plan.data_bytes - 1))
    resolve(config, FACTS, replace(MACHINE, data_bytes=plan.data_bytes))
    auto = resolve(EngineConfig("m", n_ctx=8192), FACTS, replace(MACHINE, address_space=GIB)).config
    assert 1 < auto.n_slots < 32
    assert plan.address_space > plan.total_bytes > plan.data_bytes


def cgroup(folder, limit, used, inactive=0, *, old=False):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit_name, used_name, cache = names if old else ("memory.max", "memory.current", "inactive_file")
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{cache} {inactive}\n")


def test_the_tightest_of_nested_cgroups_counts(tmp_path):
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    membership.write_text("0::/user.slice/job.scope\n")
    cgroup(root / "user.slice" / "job.scope", "max", 10)
    cgroup(root / "user.slice", 1000, 600, 50)
    assert limits.cgroup_bytes(root, membership) == 450
    cgroup(root / "user.slice" / "job.scope", 300, 100)
    assert limits.cgroup_bytes(root, membership) == 200
    cgroup(root, 250, 100)  # inside a container, the root is its own
    assert limits.cgroup_bytes(root, membership) == 150
    membership.write_text("0::/../elsewhere\n")  # the path is the host's
    assert limits.cgroup_bytes(root, membership) == 150
    (root / "cpu.max").write_text("250000 100000")
    (root / "user.slice" / "cpu.max").write_text("max 100000")
    assert limits.cgroup_cores(root, membership) == 2


def test_version_1_cgroups(tmp_path):
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    membership.write_text("5:cpu,cpuacct:/a\n4:memory:/docker/a\n0::/\n")
    cgroup(root / "memory" / "docker" / "a", 2000, 1500, 100, old=True)
    cgroup(root / "memory", 9223372036854771712, 5000, old=True)  # no limit
    assert limits.cgroup_bytes(root, membership) == 600
    assert limits.cgroup_bytes(tmp_path / "none", tmp_path / "nothing") is None


# --- GPUs ---------------------------------------------------------------------------------------------------------

TWO = (Gpu("A", 8 * GIB, 8 * GIB), Gpu("B", 8 * GIB, 8 * GIB))


def test_layers_go_to_gpus_as_llama_cpp_deals_them():
    machine = replace(MACHINE, n_gpus=2, gpus=TWO)
    plan = resolve(EngineConfig("m", n_slots=2, n_ctx=1024), FACTS, machine)
    first, second = plan.memory.gpus
    n = TENSORS[0].n_bytes
    assert (first.weights, second.weights) == (3 * n, n + NORM.n_bytes + EMBEDDING.n_bytes)  # 3 layers; 1 and output
    assert first.kv_cache == 3 * second.kv_cache > 0
    assert plan.memory.kv_cache == 0
    some = resolve(EngineConfig("m", n_slots=2, n_ctx=1024, n_gpu_layers=2, tensor_split=(0, 1)), FACTS, machine)
    assert [gpu.weights for gpu in some.memory.gpus] == [0, n + NORM.n_bytes + EMBEDDING.n_bytes]
    assert some.memory.kv_cache == 3 * some.memory.gpus[1].kv_cache


def test_a_place_of_its_own_moves_a_tensor_between_a_gpu_and_main_memory():
    machine = replace(MACHINE, n_gpus=2, gpus=TWO)
    asked = EngineConfig("m", n_slots=2, n_ctx=1024, override_tensor={"ffn_up": "CPU"})
    before = resolve(asked, FACTS, machine).memory
    first, second, third = (f"blk.{n}.ffn_up.weight" for n in range(3))
    n = TENSORS[0].n_bytes
    here = resolve(asked, replace(FACTS, placed=((first, None), (second, None))), machine)
    assert [gpu.weights for gpu in here.memory.gpus] == [before.gpus[0].weights - 2 * n, before.gpus[1].weights]
    assert here.memory.copies == before.copies + 2 * n
    assert here.memory.compute > before.compute  # the CPU now computes a part of each pass
    assert f"2 tensors, {2 * n / MIB:.0f} MiB" in here.reasons["override_tensor"]
    plain = resolve(replace(asked, extra_bufts="off"), replace(FACTS, placed=((first, None),)), machine)
    assert plain.memory.weights == EMBEDDING.n_bytes + n
    there = resolve(asked, replace(FACTS, placed=((third, 1),)), machine)
    assert [gpu.weights for gpu in there.memory.gpus] == [before.gpus[0].weights - n, before.gpus[1].weights + n]
    assert there.memory.copies == before.copies
    nowhere = resolve(asked, replace(FACTS, placed=((first, None),)), MACHINE)
    assert nowhere.memory == resolve(EngineConfig("m", n_slots=2, n_ctx=1024), FACTS, MACHINE).memory
    assert "no GPU" in nowhere.reasons["override_tensor"]


def test_locked_memory_is_within_its_limit():
    asked = EngineConfig("m", n_slots=2, use_mlock=True, extra_bufts="off")
    plan = resolve(asked, FACTS, replace(MACHINE, lockable_bytes=FACTS.file_bytes))
    assert sum(t.n_bytes for t in FACTS.tensors) <= plan.memory.locked <= FACTS.file_bytes
    assert plan.memory.reclaimable == 0
    assert f"{plan.memory.locked / MIB:,.0f} MiB" in plan.reasons["use_mlock"]
    with pytest.raises(MemoryPlanError, match=r"RLIMIT_MEMLOCK leaves 1 MiB; raise the limit \(ulimit -l\)"):
        resolve(asked, FACTS, replace(MACHINE, lockable_bytes=MIB))
    repacked = resolve(replace(asked, extra_bufts="auto"), FACTS, MACHINE)
    assert "9 MiB of repacked copies are not" in repacked.reasons["use_mlock"]
    assert resolve(replace(asked, use_mlock=False), FACTS, replace(MACHINE, lockable_bytes=0)).memory.locked == 0


def test_weights_that_a_gpu_cannot_hold_are_refused():
    small = replace(MACHINE, n_gpus=1, gpus=(Gpu("A", 20 * MIB, GIB),))
    with pytest.raises(MemoryPlanError, match=r"on A: 10 MiB weights .* = .* 20 MiB are free there"):
        resolve(EngineConfig("m", n_slots=32, n_ctx=8192, kv="split"), FACTS, small)
    metal = replace(MACHINE, n_gpus=1, unified_memory=True)
    assert resolve(EngineConfig("m", n_slots=2), FACTS, metal).memory.gpus == ()


@pytest.fixture
def nvml(monkeypatch):
    def handle(number):
        return f"GPU-{'abc'[number]}"

    fake = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=handle, nvmlDeviceGetUUID=lambda h: h.encode(), nvmlDeviceGetName=lambda h: f"N {h}",
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(free=100 + ord(h[-1]), total=1000),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_gpus_that_nvml_tells_of(nvml, monkeypatch):
    assert gpus() == tuple(Gpu(f"N GPU-{x}", 100 + ord(x), 1000) for x in "abc")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-a,9,1")
    assert [gpu.name for gpu in gpus()] == ["N GPU-c", "N GPU-a"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus() == ()


def test_without_nvml_nothing_is_known(nvml, monkeypatch):
    nvml.nvmlInit = lambda: 1 / 0
    assert gpus() == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus() == ()


def test_multi_instance_has_the_whole_model_on_each_gpu():
    machine = replace(MACHINE, n_gpus=2, gpus=TWO)
    options = {"strategy": "multi-instance", "n_slots": 2, "n_ctx": 1024}
    [need] = resolve(EngineConfig("m", **options), FACTS, machine).memory.gpus
    whole = resolve(EngineConfig("m", n_slots=2, n_ctx=1024), FACTS, replace(MACHINE, n_gpus=1, gpus=TWO[:1]))
    assert need == whole.memory.gpus[0]
    with pytest.raises(ConfigError, match="multi-instance puts each engine on one GPU"):
        resolve(EngineConfig("m", tensor_split=(1, 1), instances=2, **options), FACTS, machine)


def test_engines_that_share_a_gpu_are_counted_together():
    options = {"n_slots": 2, "n_ctx": 1024, "kv": "split"}
    one = resolve(EngineConfig("m", **options), FACTS, replace(MACHINE, n_gpus=1, gpus=TWO[:1])).memory.gpus[0]

    def accepted(free, **more):
        cards = (Gpu("A", free, 8 * GIB), Gpu("B", 8 * GIB, 8 * GIB))[: more.pop("n_gpus", 2)]
        machine = replace(MACHINE, n_gpus=len(cards), gpus=cards)
        try:
            resolve(EngineConfig("m", **{**options, **more}), FACTS, machine)
        except MemoryPlanError:
            return False
        return True

    apart = {"strategy": "multi-instance"}
    assert accepted(2 * one.total, instances=3, **apart)  # two on A, one on B
    assert not accepted(2 * one.total - 1, instances=3, **apart)
    assert not accepted(2 * one.total - 1, instances=2, n_gpus=1, **apart)
    little = replace(MACHINE, n_gpus=1, gpus=(Gpu("A", one.total, GIB),))
    with pytest.raises(MemoryPlanError, match=r"on A: 2 engines of .* n_slots or instances"):
        resolve(EngineConfig("m", instances=2, **options, **apart), FACTS, little)
    options["n_slots"] = 4  # slots of both engines, which are in one process
    shared = one.weights + 2 * (one.kv_cache + one.compute)
    assert accepted(shared, instances=2, n_gpus=1)
    assert not accepted(shared - 1, instances=2, n_gpus=1)


def test_zeros_are_no_shares():
    """With zeros llama.cpp divides layers by free memory."""
    machine = replace(MACHINE, n_gpus=2, gpus=TWO)
    assert machine.gpu_shares((0.0, 0.0)) == machine.gpu_shares(None) == (8.0 * GIB, 8.0 * GIB)


def test_a_tied_embedding_has_a_copy_on_the_gpu_of_the_output():
    machine = replace(MACHINE, n_gpus=2, gpus=TWO)
    options = {"n_slots": 2, "n_ctx": 1024}
    tied = resolve(EngineConfig("m", **options), FACTS, machine).memory
    own = replace(FACTS, tensors=laid_out(*FACTS.tensors, replace(EMBEDDING, name="output.weight")))
    apart = resolve(EngineConfig("m", **options), own, machine).memory
    assert [gpu.weights for gpu in tied.gpus] == [gpu.weights for gpu in apart.gpus]
    assert tied.weights >= EMBEDDING.n_bytes  # the embedding in the file stays mapped for look-ups
    assert tied.reclaimable >= EMBEDDING.n_bytes


def test_the_buffers_beside_gpus():
    options = {"n_slots": 2, "n_ctx": 1024, "n_ubatch": 512}
    machine = replace(MACHINE, n_gpus=2, gpus=TWO)

    def buffers(machine):
        found = resolve(EngineConfig("m", **options), FACTS, machine).memory
        return found.compute, *(gpu.compute for gpu in found.gpus)

    embedded = 512 * FACTS.widths.n_embd * 4
    inputs = input_bytes(FACTS.widths, 512, 1024, flash=True)
    assert inputs == 512 * 1024 * 2 + embedded
    here, alone = buffers(replace(MACHINE, n_gpus=1, gpus=TWO[:1]))
    both, first, last = buffers(machine)
    # the inputs exist four times where passes over two GPUs overlap
    assert both - here == 3 * inputs
    assert first - alone == 3 * inputs + embedded
    assert last < first  # only output rows leave the last layer
    off = resolve(EngineConfig("m", **options, flash_attn="off"), FACTS, machine).memory.gpus[0].compute
    assert off > first  # attention scores are stored; flash_attn="auto" stores none
    on_cpu = resolve(EngineConfig("m", **options, offload_kqv=False), FACTS, machine).memory
    assert [gpu.kv_cache for gpu in on_cpu.gpus] == [0, 0]
    assert on_cpu.kv_cache > 0


def test_logits_are_on_the_gpu_of_the_output_alone():
    machine, config = replace(MACHINE, n_gpus=2, gpus=TWO), EngineConfig("m", strategy="batched", n_slots=4, n_ctx=512)
    few, many = (
        resolve(config, replace(FACTS, n_vocab=n, widths=None), machine).memory.gpus for n in (1_000, 2_000_000)
    )
    assert few[0].compute == many[0].compute
    assert few[1].compute < many[1].compute


def test_slots_on_gpus_are_what_fits_in_their_memory():
    def slots(gib: float, **changed) -> int:
        asked = {name: changed.pop(name) for name in ("n_gpu_layers", "offload_kqv") if name in changed}
        gpu = Gpu("A", int(gib * GIB), int(gib * GIB))
        machine = replace(MACHINE, **{"n_gpus": 1, "gpus": (gpu,), **changed})
        return resolve(EngineConfig("m", n_ctx=8192, **asked), FACTS, machine).config.n_slots

    assert slots(40) == slots(40, n_gpu_layers=5) == 128
    assert 32 < slots(1.5) < 128  # slots use half of the memory
    assert slots(40, n_gpus=0, gpus=()) == 32
    assert slots(40, unified_memory=True) == 32
    assert slots(40, offload_kqv=False) == 32
    assert slots(40, n_gpu_layers=3) == 32


def test_rows_of_prompts_take_more_working_memory_unless_all_rows_are_alike():
    widths = Widths(512, 1000, 8, 512, 128, 12 * 512)
    plain, marked = work_bytes(widths, 512), work_bytes(widths, 512, prompt_threads=2)
    assert plain == int(512 * 2048 * 1.15)
    assert marked == 512 * 2048 * 4 + 2 * 512 * 1152
    assert work_bytes(widths, 2048, prompt_threads=2) - 4 * 512 * 2048 * 4 == 2 * 512 * 1152
