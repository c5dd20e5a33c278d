from dataclasses import replace

import pytest

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError, MemoryPlanError
from llamabatch.gguf.reader import TensorInfo
from llamabatch.planning.capacity import resolve
from llamabatch.planning.compute_buffers import Widths
from llamabatch.planning.context_length import scaled_ctx
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import memory
from llamabatch.planning.model_facts import ModelFacts
from tests.unit.configs import resolved

GIB = 2**30
# Qwen2.5-0.5B: 24 layers, 14 heads on 2 KV heads of 64
FACTS = ModelFacts("small", 530_000_000, 24 * 2 * 64, 24 * 2 * 64, 896, 14, 151_936, 32_768)
MACHINE = Machine(cores=8, available_bytes=16 * GIB)


def test_facts_from_metadata():
    metadata = {
        "general.architecture": "qwen2",
        "general.name": "small",
        "qwen2.block_count": "24",
        "qwen2.embedding_length": "896",
        "qwen2.attention.head_count": "14",
        "qwen2.attention.head_count_kv": "2",
        "qwen2.context_length": "32768",
    }
    wanted = replace(FACTS, arch="qwen2", head_sizes=(64, 64))
    assert ModelFacts.from_metadata(metadata, 530_000_000, 151_936) == wanted
    layers = ", ".join(["2"] * 12 + ["4"] * 12)
    uneven = ModelFacts.from_metadata(metadata | {"qwen2.attention.head_count_kv": f"[{layers}]"}, 1, 1)
    assert uneven.k_values == (12 * 2 + 12 * 4) * 64


def test_elements_that_layers_keep():
    """tests/model/test_architectures.py compares these numbers with what llama.cpp allocates."""
    common = {"general.architecture": "x", "x.block_count": "4", "x.embedding_length": "64"}
    attention = {"x.attention.head_count": "4", "x.attention.head_count_kv": "0,2,0,2"}
    hybrid = ModelFacts.from_metadata(common | attention | {"x.shortconv.l_cache": "4"}, 1, 1)
    assert (hybrid.k_values, hybrid.v_values, hybrid.state_values) == (64, 64, 2 * 3 * 64)
    ssm = {"x.ssm.conv_kernel": "4", "x.ssm.inner_size": "128", "x.ssm.state_size": "8", "x.attention.head_count": "0"}
    recurrent = ModelFacts.from_metadata(common | ssm, 1, 1)
    assert (recurrent.k_values, recurrent.v_values, recurrent.state_values) == (0, 0, 4 * (3 * 128 + 8 * 128))
    need = memory(recurrent, resolved(n_slots=8))
    assert (need.kv_cache, need.layout) == (8 * recurrent.state_values * 4, "8 states")
    latent = {"x.attention.head_count_kv": "1", "x.attention.key_length": "40", "x.attention.key_length_mla": "24"}
    assert ModelFacts.from_metadata(common | attention | latent, 1, 1).k_values == 4 * 40
    assert ModelFacts.from_metadata(common | attention | latent, 1, 1).v_values == 0


def test_a_state_is_kept_once_for_each_guess_where_llama_cpp_can_roll_it_back():
    common = {"block_count": "4", "embedding_length": "64", "attention.head_count": "4", "ssm.conv_kernel": "4"}
    ssm = {"ssm.inner_size": "8192", "ssm.state_size": "256"}

    def planned(architecture="qwen35", free=16 * GIB, **options):
        own = {f"{architecture}.{key}": value for key, value in (common | ssm).items()}
        facts = ModelFacts.from_metadata({"general.architecture": architecture, **own}, 1, 1)
        return facts, resolve(EngineConfig("m", n_ctx=256, instances=1, **options), facts, Machine(8, free))

    _, plain = planned(n_slots=4)
    assert (plain.config.n_draft, "n_draft" in plain.reasons) == (8, False)
    facts, guessing = planned(n_slots=4, speculate="lookup")
    assert guessing.config.n_draft == 8
    assert "kept once more for each guess" in guessing.reasons["n_draft"]
    assert guessing.memory.kv_cache - plain.memory.kv_cache == 8 * 4 * 4 * facts.state_values
    _, little = planned(n_slots=8, speculate="lookup", free=8 * GIB)
    assert little.config.n_draft == 8 * GIB // 8 // (8 * 4 * facts.state_values) - 1 == 4
    assert planned(n_slots=4, speculate="lookup", n_batch=8, n_ubatch=6)[1].config.n_draft == 4
    assert "n_draft" not in planned("jamba", speculate="lookup")[1].reasons


def test_layers_that_read_the_cells_of_others_keep_none():
    own = {"block_count": "6", "embedding_length": "64", "attention.head_count": "4", "attention.shared_kv_layers": "2"}
    named = {f"gemma4.{key}": value for key, value in own.items()}
    facts = ModelFacts.from_metadata({"general.architecture": "gemma4", **named}, 1, 1)
    assert facts.k_values == 4 * 64


def test_layers_of_hybrids_that_keep_no_cells_or_no_state():
    """tests/model/test_graph_buffers.py compares small models of these architectures with what llama.cpp allocates."""

    def kept(arch, **values):
        common = {"block_count": 5, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
        state = {"ssm.conv_kernel": 1, "ssm.inner_size": 8, "ssm.state_size": 4}
        named = {key.replace("__", "."): value for key, value in values.items()}
        own = {f"{arch}.{key}": str(value) for key, value in {**common, **state, **named}.items()}
        facts = ModelFacts.from_metadata({"general.architecture": arch, **own}, 1, 1)
        return facts.k_values // 32, facts.state_values // 32  # number of layers with cells, and of layers with a state

    assert kept("qwen35") == (1, 4)  # every fourth layer has attention
    assert kept("qwen35", full_attention_interval=2) == (2, 3)
    assert kept("qwen35moe", attention__recurrent_layers="true,false,true,false,false") == (3, 2)
    assert kept("qwen3next", nextn_predict_layers=1) == (1, 3)  # the last layer guesses tokens
    assert kept("nemotron_h", attention__head_count_kv="0,0,2,0,0", feed_forward_length="0,9,0,9,0") == (1, 2)
    assert kept("falcon-h1") == (5, 5)


def test_kv_cache_is_what_llama_cpp_allocates():
    # llama.cpp's log for this shape: 4096 cells, 24 layers, K (f16) 24.00 MiB, V (f16) 24.00 MiB
    need = memory(FACTS, resolved())
    assert need.kv_cache == 48 * 2**20
    assert memory(FACTS, resolved(n_ctx=300)).kv_cache == 512 * 24 * 2 * 64 * 2 * 2
    assert memory(FACTS, resolved(type_k="q8_0")).kv_cache == (24 + 12.75) * 2**20


def test_defaults():
    plan = resolve(EngineConfig("m"), FACTS, MACHINE)
    config = plan.config
    assert (config.n_ctx, config.n_slots, config.n_threads, config.instances) == (4096, 32, 8, 1)
    assert (config.strategy, config.flash_attn) == ("batched", "off")
    assert {"n_ctx", "n_slots", "strategy", "n_threads", "flash_attn"} <= plan.reasons.keys()
    assert "KV cache" in plan.describe()


def test_the_family_that_thinks_is_named():
    template = r"<|im_start|> reasoning_content <tool_call> '\n</think>\n\n'"
    facts = ModelFacts.from_metadata({"tokenizer.chat_template": template}, 1, 1)
    facts = replace(FACTS, chat_template=facts.chat_template)
    plan = resolve(EngineConfig("m"), facts, MACHINE)
    assert plan.reasoning == "qwen3"
    assert "reasoning = qwen3: by the model's chat template" in plan.describe()
    assert resolve(EngineConfig("m", reasoning_format="none"), facts, MACHINE).reasoning is None
    assert resolve(EngineConfig("m", reasoning_tags=("a", "b")), facts, MACHINE).reasoning == "custom"
    assert "reasoning" not in resolve(EngineConfig("m"), FACTS, MACHINE).describe()


@pytest.mark.parametrize(
    ("free_gib", "options", "found"),
    [
        (64, {}, (32_768, 32)),
        (8, {}, (32_768, 6)),
        (6, {}, (16_384, 10)),  # 4 slots of 32,768 cells would not fit
        (2, {}, (4096, 7)),
        (64, {"n_slots": 64}, (32_768, 64)),
        (64, {"n_slots": 128}, (16_384, 128)),
        (3, {"strategy": "sequential"}, (16_384, 32)),  # the sequential strategy has one slot
    ],
)
def test_a_fitted_context_is_as_long_as_a_few_slots_allow(free_gib, options, found):
    machine = replace(MACHINE, available_bytes=int(free_gib * 2**30))
    plan = resolve(EngineConfig("m", n_ctx="fit", **options), FACTS, machine)
    assert (plan.config.n_ctx, plan.config.n_slots) == found, plan.describe()
    assert resolve(EngineConfig("m", **options), FACTS, machine).config.n_ctx == 4096


def test_a_fitted_context_is_not_above_what_the_model_was_trained_for():
    for trained, found in ((2048, 2048), (6000, 6000), (2**17, 32_768)):
        facts = replace(FACTS, n_ctx_train=trained)
        assert resolve(EngineConfig("m", n_ctx="fit"), facts, MACHINE).config.n_ctx == found
    assert resolve(EngineConfig("m", n_ctx="fit"), replace(FACTS, is_encoder=True), MACHINE).config.n_ctx == 4096
    assert resolve(EngineConfig("m", n_ctx="fit", kv="unified", kv_cells=9000), FACTS, MACHINE).config.n_ctx == 9000


def scaled(n_ctx, facts=FACTS, **options):
    config = EngineConfig("m", n_ctx=n_ctx, **options)
    return resolve(config, replace(facts, n_ctx_scaled=scaled_ctx(config, facts)), MACHINE).config.n_ctx


def test_a_scaled_rotary_embedding_reaches_beyond_the_training():
    short = replace(FACTS, n_ctx_train=2048)
    with pytest.raises(
        ConfigError,
        match=r"takes 32 to 2048, as many as it was trained for; rope_scaling='yarn' with rope_freq_scale=0.25",
    ):
        scaled(8192, short)
    assert scaled(8192, short, rope_freq_scale=0.25, rope_scaling="yarn") == 8192
    assert scaled("auto", short, rope_freq_scale=0.25) == 4096
    assert scaled("auto", short, rope_freq_base=1e6) == 2048
    assert scaled(50_000, short, rope_freq_base=1e6) == 50_000
    with pytest.raises(ConfigError, match="scaled rotary embedding reaches 8192"):
        scaled(8193, short, rope_freq_scale=0.25)
    assert scaled(4096, short, rope_freq_scale=0.25, yarn_orig_ctx=1024) == 4096
    with pytest.raises(ConfigError, match="reaches 4096"):
        scaled(4097, replace(short, n_ctx_orig=1024), rope_freq_scale=0.25)  # the file already has a scale
    with pytest.raises(ConfigError, match="its table of positions ends there"):
        scaled(4096, replace(short, has_positions=True), rope_freq_scale=0.25)
    more = memory(short, resolved(n_ctx=8192)).kv_cache
    assert more == 2 * memory(short, resolved(n_ctx=4096)).kv_cache


def start_of(config=None, facts=FACTS, machine=MACHINE):
    plan = resolve(config or EngineConfig("m"), facts, machine)
    return plan.config.start_slots, plan.config.n_slots


def test_a_context_starts_with_all_slots_where_they_are_asked_for_or_cost_nothing():
    assert start_of(EngineConfig("m", n_slots=32)) == (32, 32)
    assert start_of(machine=replace(MACHINE, lazy_cells=True)) == (32, 32)
    few = replace(FACTS, k_values=64, v_values=64)  # 32 slots take 1 MiB each
    assert start_of(facts=few) == (32, 32)
    for kind in ({"state_values": 10}, {"draft": few}, {"widths": Widths(896, 1000, 14, 896, 128, 4864, masks=2)}):
        assert start_of(facts=replace(FACTS, **kind))[0] == start_of(facts=replace(FACTS, **kind))[1] > 8
    on_gpu = Machine(8, 16 * GIB, n_gpus=1)  # a GPU clears its own memory fast
    assert start_of(machine=on_gpu) == (32, 32)
    assert start_of(EngineConfig("m", n_gpu_layers=0), machine=on_gpu)[0] == 5


def test_otherwise_it_starts_with_few_and_the_plan_counts_both():
    assert start_of() == (5, 32)  # 48 MiB a slot
    large = replace(FACTS, k_values=10 * FACTS.k_values, v_values=10 * FACTS.v_values)
    assert start_of(facts=large)[0] == 1
    assert start_of(EngineConfig("m", start_slots=9)) == (9, 32)
    assert start_of(EngineConfig("m", start_slots=9, n_slots=4)) == (4, 4)
    all_of_it, plan = (resolve(EngineConfig("m", n_slots=32, start_slots=n), FACTS, MACHINE) for n in (32, 5))
    assert plan.memory.kv_cache - all_of_it.memory.kv_cache == 5 * 48 * 2**20
    assert plan.memory.compute > all_of_it.memory.compute
    assert "(32 x 4,096 cells, and those of 5 while it grows)" in plan.describe()
    two = resolve(EngineConfig("m", n_slots=32, start_slots=5, instances=2), FACTS, MACHINE).config.for_one_engine()
    assert (two.n_slots, two.start_slots) == (16, 3)
    for value in (0, 257, "all"):
        with pytest.raises(ConfigError, match="start_slots"):
            EngineConfig("m", start_slots=value)


def test_flash_attention_where_it_is_fast():
    stock, patched = Machine(8, 16 * GIB), Machine(8, 16 * GIB, fast_attention=True)
    assert resolve(EngineConfig("m"), FACTS, stock).config.flash_attn == "off"
    assert resolve(EngineConfig("m"), FACTS, patched).config.flash_attn == "on"
    assert resolve(EngineConfig("m", flash_attn="off"), FACTS, patched).config.flash_attn == "off"
    assert resolve(EngineConfig("m"), replace(FACTS, file_bytes=3_000_000), stock).config.flash_attn == "on"
    assert resolve(EngineConfig("m", type_v="q8_0"), FACTS, stock).config.flash_attn == "on"
    assert resolve(EngineConfig("m"), FACTS, replace(stock, n_gpus=1)).config.flash_attn == "auto"


def test_fewer_slots_where_memory_is_short():
    small = resolve(EngineConfig("m"), FACTS, Machine(8, 3 * GIB)).config
    assert 1 < small.n_slots < 32
    assert resolve(EngineConfig("m"), FACTS, Machine(8, int(0.95 * GIB))).config.strategy == "sequential"


def test_an_engine_that_does_not_fit_is_refused_with_the_sum():
    parts = r"505 MiB weights \+ 24,576 MiB KV cache \(64 x 32,768 cells\) .* = .* MiB; lower"
    the_sum = r"^[\d,]+ MiB are needed, but [\d,]+ MiB are free: " + parts
    with pytest.raises(MemoryPlanError, match=the_sum):
        resolve(EngineConfig("m", n_slots=64, n_ctx=32_768, kv="split"), FACTS, MACHINE)
    config = EngineConfig("m", strategy="multi-instance", instances=40, n_slots=8, kv="split")
    with pytest.raises(MemoryPlanError, match="40 engines of"):
        resolve(config, FACTS, MACHINE)


def test_a_gpu_holds_its_own():
    resolve(EngineConfig("m", n_slots=64, n_ctx=32_768), FACTS, replace(MACHINE, n_gpus=1))


def test_a_context_length_that_is_given_is_used_whole():
    facts = replace(FACTS, arch="llama")  # its header already has the overridden value
    for key, n_ctx in (("llama.context_length", 32_768), ("other.context_length", 4096)):
        found = resolve(EngineConfig("m", n_slots=1, kv_overrides={key: 32_768}), facts, MACHINE)
        assert found.config.n_ctx == n_ctx


def test_multi_instance_divides_cores_and_memory():
    plan = resolve(EngineConfig("m", strategy="multi-instance"), FACTS, MACHINE)
    assert (plan.config.instances, plan.config.n_threads) == (2, 4)
    two = resolve(EngineConfig("m", strategy="multi-instance"), FACTS, Machine(2, 16 * GIB))
    assert (two.config.instances, two.config.n_threads) == (2, 1)


CUDA = replace(MACHINE, n_gpus=1, backends=frozenset({"CUDA"}))


def test_flash_attention_on_cuda():
    def planned(machine=CUDA, facts=FACTS, **options):
        plan = resolve(EngineConfig("m", n_ctx=1024, n_slots=2, **options), facts, machine)
        return plan.config.flash_attn, plan.reasons

    assert planned()[0] == "auto"
    assert "type_k" not in planned(type_k="q8_0", type_v="q8_0")[1]
    assert "q5_0-f16 becomes f16 in each pass" in planned(type_k="q5_0")[1]["type_k"]
    assert "type_k" not in planned(replace(CUDA, kv_pairs=frozenset({"q5_0-f16"})), type_k="q5_0")[1]
    assert "type_k" not in planned(MACHINE, type_k="q5_0")[1]
    assert planned(type_k="iq4_nl") == ("off", planned(type_k="iq4_nl")[1])
    for options in ({"type_v": "iq4_nl"}, {"type_k": "iq4_nl", "flash_attn": "on"}):
        with pytest.raises(ConfigError, match="which flash attention on CUDA cannot read"):
            planned(**options)
        assert planned(**options, offload_kqv=False)[0] == "on"
    odd = replace(FACTS, widths=Widths(128, 1000, 4, 4 * 48, 256, 1024))
    flash, reasons = planned(facts=odd)
    assert (flash, "heads of 48" in reasons["flash_attn"]) == ("off", True)


def test_threads():
    small = resolve(EngineConfig("m", strategy="batched"), replace(FACTS, file_bytes=3_000_000), MACHINE).config
    assert (small.n_threads, small.n_threads_batch) == (1, 8)
    large = resolve(EngineConfig("m"), FACTS, MACHINE).config
    assert (large.n_threads, large.n_threads_batch) == (8, 8)
    given = resolve(EngineConfig("m", n_threads=3), FACTS, MACHINE).config
    assert (given.n_threads, given.n_threads_batch) == (3, 3)
    both = resolve(EngineConfig("m", n_threads=3, n_threads_batch=5), FACTS, MACHINE).config
    assert (both.n_threads, both.n_threads_batch) == (3, 5)


def test_this_machine_has_cores_and_memory():
    here = Machine.here()
    assert here.cores >= 1
    assert here.available_bytes > 0


def test_unified_takes_what_split_refuses():
    # one request of 8k beside 31 of 256: 16,128 cells are enough, but memory for 32 x 8,192 is missing
    little = Machine(8, 3 * GIB)
    with pytest.raises(MemoryPlanError, match="32 x 8,192 cells"):
        resolve(EngineConfig("m", n_slots=32, n_ctx=8192, kv="split", flash_attn="on"), FACTS, little)
    plan = resolve(EngineConfig("m", n_slots=32, n_ctx=8192, flash_attn="on", cache_ram=0), FACTS, little)
    assert (plan.config.kv, plan.config.n_slots) == ("unified", 32)
    assert 8192 + 31 * 256 <= plan.config.kv_cells < 32 * 8192
    assert (
        plan.memory.total <= 1.5 * GIB < memory(FACTS, replace(plan.config, kv_cells=plan.config.kv_cells + 256)).total
    )
    assert "would not fit" in plan.reasons["kv"]


def test_unified_is_chosen_where_only_a_few_slots_would_fit():
    few = resolve(EngineConfig("m", n_ctx=32_768, flash_attn="on"), FACTS, Machine(8, 3 * GIB)).config
    assert (few.kv, few.n_slots, few.kv_cells % 256) == ("unified", 32, 0)
    assert few.kv_cells >= 32_768
    assert resolve(EngineConfig("m", n_ctx=4096), FACTS, MACHINE).config.kv == "split"
    one = EngineConfig("m", n_ctx=32_768, flash_attn="on", strategy="sequential")
    assert resolve(one, FACTS, Machine(8, 3 * GIB)).config.kv == "split"


def test_unified_by_request():
    given = resolve(EngineConfig("m", kv="unified", n_slots=8, n_ctx=1000, kv_cells=3000), FACTS, MACHINE)
    assert (given.config.kv, given.config.kv_cells) == ("unified", 3000)
    assert "3,072 cells shared by 8" in given.memory.describe()
    most = resolve(EngineConfig("m", kv="unified", n_slots=8, n_ctx=1000), FACTS, MACHINE).config
    assert most.kv_cells == 8 * 1024
    assert resolve(EngineConfig("m", kv_cells=9000), FACTS, MACHINE).config.kv == "unified"


def test_kv_cells_out_of_place():
    with pytest.raises(ConfigError, match="kv_cells is 500; it must be at least n_ctx, 4096"):
        resolve(EngineConfig("m", kv_cells=500), FACTS, MACHINE)
    with pytest.raises(ConfigError, match="at least n_ctx, 600"):
        EngineConfig("m", kv_cells=500, n_ctx=600)
    with pytest.raises(ConfigError, match="kv is 'split'"):
        EngineConfig("m", kv_cells=500, kv="split")


def test_several_engines_share_the_weights_of_a_small_model():
    small = replace(FACTS, file_bytes=3_000_000)
    plan = resolve(EngineConfig("m"), small, Machine(2, 16 * GIB))
    config, part = plan.config, plan.config.for_one_engine()
    assert (config.strategy, config.instances, config.n_slots) == ("batched", 2, 32)
    assert (part.instances, part.n_slots, part.n_threads, part.n_threads_batch) == (1, 16, 1, 1)
    assert "wait for each other" in plan.reasons["instances"]
    assert resolve(EngineConfig("m"), small, Machine(64, 64 * GIB)).config.instances == 4
    assert resolve(EngineConfig("m", n_slots=5), small, Machine(64, 64 * GIB)).config.instances == 2


@pytest.mark.parametrize(
    "options",
    [{"strategy": "batched"}, {"strategy": "sequential"}, {"n_threads": 2}, {"n_threads_batch": 2}, {"n_slots": 1}],
)
def test_one_engine_where_the_caller_says_how_to_compute(options):
    small = replace(FACTS, file_bytes=3_000_000)
    assert resolve(EngineConfig("m", **options), small, Machine(2, 16 * GIB)).config.instances == 1


def test_instances_by_request():
    plan = resolve(EngineConfig("m", strategy="batched", instances=3, n_slots=32), FACTS, MACHINE)
    part = plan.config.for_one_engine()
    assert (plan.config.instances, part.n_slots, part.n_threads) == (3, 11, 2)
    assert resolve(EngineConfig("m"), FACTS, MACHINE).config.instances == 1  # a large model keeps all threads busy
    on_gpu = resolve(EngineConfig("m"), replace(FACTS, file_bytes=3_000_000), replace(MACHINE, n_gpus=1))
    assert on_gpu.config.instances == 1


class TestDeviceSampling:
    GPUS = replace(MACHINE, n_gpus=1)

    def chosen(self, machine=GPUS, facts=FACTS, **options):
        plan = resolve(EngineConfig("m", **options), facts, machine)
        return plan.config.device_sampling, plan.reasons.get("device_sampling", "")

    def test_is_on_where_the_output_is_on_a_gpu(self):
        value, why = self.chosen()
        assert value == "auto"
        assert f"65 tokens of a row instead of {FACTS.n_vocab}" in why
        assert self.chosen(device_sampling=True)[0] == "on"

    def test_is_off_elsewhere(self):
        assert self.chosen(MACHINE) == ("off", "")
        assert self.chosen(n_gpu_layers=0)[0] == "off"
        assert self.chosen(speculate="lookup")[0] == "off"
        output = TensorInfo("output.weight", (896, 151_936), 1, 0, 2 * 896 * 151_936)
        assert self.chosen(facts=replace(FACTS, tensors=(output,), placed=((output.name, None),)))[0] == "off"
        assert self.chosen(facts=replace(FACTS, tensors=(output,), placed=((output.name, 0),)))[0] == "auto"
        assert self.chosen(facts=replace(FACTS, n_vocab=65))[0] == "off"
        assert self.chosen(device_sampling=False)[0] == "off"

    def test_counts_rows_four_times(self):
        on, off = (
            resolve(EngineConfig("m", n_slots=4, n_ctx=512, device_sampling=value), FACTS, MACHINE).memory
            for value in ("on", "off")
        )
        assert on.compute - off.compute >= 4 * FACTS.n_vocab * 12

    def test_a_small_vocabulary_is_refused(self):
        with pytest.raises(ConfigError, match=r"device_sampling is 'on'.* 65 tokens"):
            self.chosen(facts=replace(FACTS, n_vocab=65), device_sampling="on")


def test_states_on_their_way_to_the_disk_and_back_count():
    with_disk, without = (
        resolve(EngineConfig("m", n_slots=4, n_ctx=1024, cache_ram=64, cache_disk=folder), FACTS, MACHINE)
        for folder in ("x", None)
    )
    assert with_disk.total_bytes - without.total_bytes == without.memory.kv_cache // 2


def test_memory_for_saved_prefixes_is_a_quarter_of_what_is_left_and_counts():
    windows = {"widths": Widths(896, 1000, 14, 896, 128, 4864, masks=2)}
    for kind in ({"state_values": 1000}, windows):
        plan = resolve(EngineConfig("m"), replace(FACTS, **kind), MACHINE)
        without = resolve(EngineConfig("m", cache_ram=0), replace(FACTS, **kind), MACHINE)
        left = MACHINE.available_bytes - without.peak_bytes
        assert plan.config.cache_ram == left // (4 * 2**20) > 0
        assert plan.total_bytes == without.total_bytes + plan.config.cache_ram * 2**20
        assert f"{plan.config.cache_ram:,} MiB saved prefixes" in plan.describe()
        assert "cache_ram" in plan.reasons
        assert (without.config.cache_ram, "saved prefixes" in without.describe()) == (0, False)
        much = resolve(EngineConfig("m"), replace(FACTS, **kind), replace(MACHINE, available_bytes=200 * GIB))
        assert much.config.cache_ram == 8192
        assert resolve(EngineConfig("m", cache_prefix=False), replace(FACTS, **kind), MACHINE).config.cache_ram == 0
    for n_bytes, cache_ram in ((16 * GIB, 64 * 48), (4 * GIB, None)):  # ordinary cells: at most those of 64 slots
        machine = Machine(8, n_bytes)
        plan, without = (resolve(EngineConfig("m", cache_ram=n), FACTS, machine) for n in ("auto", 0))
        left = (machine.available_bytes - without.peak_bytes) // (4 * 2**20)
        assert plan.config.cache_ram == min(cache_ram or left, left)
        assert plan.memory.cache_ram == plan.config.cache_ram * 2**20
    for kind, options in ((windows, {"kv": "unified"}), ({"arch": "deepseek4"}, {})):  # these share no prefixes
        assert resolve(EngineConfig("m", **options), replace(FACTS, **kind), MACHINE).config.cache_ram == 0
    assert resolve(EngineConfig("m", cache_ram=100), FACTS, MACHINE).memory.cache_ram == 100 * 2**20
    with pytest.raises(MemoryPlanError, match="MiB saved prefixes"):
        resolve(EngineConfig("m", cache_ram=20_000), FACTS, MACHINE)
    room = MACHINE.available_bytes // 3 // 2**20
    given, usual = (resolve(EngineConfig("m", cache_ram=n), FACTS, MACHINE).config for n in (room, 0))
    assert (given.n_slots, given.n_ctx) == (usual.n_slots, usual.n_ctx)
