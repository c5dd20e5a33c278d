"""Defects of the scheduler and the engine."""

from __future__ import annotations

from tests.defects import Defect

DEFECTS = (
    Defect(
        what="requests with different cache_salts share their prefixes, so that one can find out what another asked",
        file="llamabatch/scheduler/common_prefix.py",
        old="return ShareKey(request.adapters, request.params.cache_salt)",
        new="return ShareKey(request.adapters)",
        tests=("tests/unit/scheduler/test_kv_cache.py", "tests/unit/scheduler/test_checkpoints.py"),
    ),
    Defect(
        what="a prompt that comes again after an answer with overflow='shift' goes on behind cells of other tokens",
        file="llamabatch/scheduler/kv_cache.py",
        old="if not self._caches_prefixes or sequence.num_computed < MIN_SHARED or sequence.num_discarded:",
        new="if not self._caches_prefixes or sequence.num_computed < MIN_SHARED:",
        tests=(
            "tests/unit/scheduler/test_overflow.py",
            "tests/unit/scheduler/test_kv_cache.py",
            "tests/model/test_outgrown.py",
        ),
    ),
    Defect(
        what="a request that was preempted, and is cancelled while it waits again, takes a slot for good",
        file="llamabatch/scheduler/scheduler.py",
        old="if sequence.slot is None:\n            self._waiting.forget(sequence)",
        new="if not sequence.was_admitted:\n            self._waiting.forget(sequence)",
        tests=(
            "tests/unit/scheduler/test_priorities.py",
            "tests/unit/scheduler/test_scheduler.py",
            "tests/model/test_queueing.py",
        ),
    ),
    Defect(
        what="cancelling a request whose prompt two others wait for ends the engine, as they then wait for each other",
        file="llamabatch/scheduler/prefix_cache.py",
        old="earlier: abc.Iterator[Sequence] = itertools.takewhile(lambda other: other is not sequence, running)",
        new="earlier: abc.Iterator[Sequence] = (other for other in running if other is not sequence)",
        tests=(
            "tests/unit/scheduler/test_scheduler.py",
            "tests/unit/scheduler/test_priorities.py",
            "tests/model/test_prefix_cache.py",
        ),
    ),
    Defect(
        what="an adapter that a request has used can never be unloaded again",
        file="llamabatch/scheduler/adapter_batching.py",
        old="self._names -= Counter(name for name, _ in request.adapters)",
        new="self._names.subtract(name for name, _ in request.adapters)",
        tests=("tests/unit/scheduler/test_adapter_batching.py", "tests/model/test_adapters.py"),
    ),
    Defect(
        what="after an adapter's name is given to another file, prefixes saved in main memory are those of the old one",
        file="llamabatch/scheduler/scheduler.py",
        old="self.prefix_cache.drop(lambda key: any(name == used for used, _ in key.adapters))",
        new="self._kv_cache.evict_keys(lambda key: any(name == used for used, _ in key.adapters))",
        tests=(
            "tests/unit/scheduler/test_checkpoints.py",
            "tests/unit/scheduler/test_adapter_batching.py",
            "tests/model/test_adapters.py",
        ),
    ),
    Defect(
        what="a request never gets a slot while more urgent ones keep coming",
        file="llamabatch/scheduler/request_queue.py",
        old="oldest.overtaken += 1",
        new="found.overtaken += 1",
        tests=("tests/unit/scheduler/test_request_queue.py", "tests/unit/scheduler/test_priorities.py"),
    ),
    Defect(
        what="with speculative decoding, an answer with a DRY penalty is another one than without",
        file="llamabatch/scheduler/spec_decode.py",
        old="or params.dry_multiplier\n        or params.structured_outputs is not None",
        new="or params.structured_outputs is not None",
        tests=(
            "tests/unit/scheduler/test_spec_decode.py",
            "tests/model/test_rare_samplers.py",
            "tests/model/test_speculative_text.py",
        ),
    ),
    Defect(
        what="best_of prefers short answers, whose tokens are no likelier",
        file="llamabatch/engine/parallel_sampling.py",
        old="return completion.cumulative_logprob / len(completion.token_ids)",
        new="return completion.cumulative_logprob",
        tests=("tests/unit/engine/test_parallel_sampling.py", "tests/model/test_llm.py"),
    ),
    Defect(
        what="texts to embed with different adapters that come together all get the vectors of the first one's adapter",
        file="llamabatch/engine/embedding.py",
        old="alike = not taken or request.adapters == taken[0].adapters",
        new="alike = not taken or bool(request.adapters) == bool(taken[0].adapters)",
        tests=("tests/unit/engine/test_embedding_queue.py", "tests/model/test_embeddings.py"),
    ),
)
