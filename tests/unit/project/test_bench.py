"""The benchmark without running it: workloads, best flags, limit, ratios, intervals, reports, with invented figures."""

import dataclasses
import json
import os
import random
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks import ab, grid, idle, limit, llama_programs, pairs, places, report, rounds, stock
from benchmarks.bench import make_peers
from benchmarks.peers import servers
from benchmarks.peers.base import Model, Result, Setup, check_tokens, first_token_s, gaps
from benchmarks.peers.child import LlamaLoop
from benchmarks.process import PeerFailure, environment
from benchmarks.workloads import WORKLOADS, Job, Shape, Workload
from llamabatch.llama import library
from llamabatch.native_build import recipe, source
from llamabatch.native_build.plan import MARKER, Plan
from llamabatch.native_build.tools import SetupFailure
from llamabatch.planning import binding_choice
from llamabatch.planning.binding_choice import Build, Choice, Origin

N_VOCAB = 5000


def result(tps: float, n: int = 100, gaps_s=(), memory=None, **said) -> Result:
    return Result(n / tps, [n], list(gaps_s), memory, facts=said)


def series(peer: str, workload: str, speeds, **more) -> rounds.Series:
    return rounds.Series(peer, workload, [result(tps, **more) for tps in speeds])


def test_ours_and_its_peers_run_on_one_build(monkeypatch, tmp_path):
    installed, built = tmp_path / "site" / "llama_cpp", tmp_path / "builds" / "1" / "llamabatch_llama"
    used = {"marker": {"key": "abc"}}

    def use(origin, folder):
        choice = Choice(Build(origin, folder, folder / "lib"), (), ())
        monkeypatch.setattr(library, "library_info", lambda: SimpleNamespace(choice=choice, **used))

    monkeypatch.setattr(binding_choice, "installed", lambda package: installed)
    use(Origin.INSTALLED, installed)
    assert places.installed_build() == "abc"
    use(Origin.BUILT, built)
    with pytest.raises(SetupFailure, match=f"LLAMABATCH_LLAMA={installed}"):
        places.installed_build()
    used["marker"] = None
    use(Origin.INSTALLED, installed)
    with pytest.raises(SetupFailure, match="not the one that native_patches builds"):
        places.installed_build()
    monkeypatch.setattr(binding_choice, "installed", lambda package: None)
    with pytest.raises(SetupFailure, match="make setup"):
        places.installed_build()


# --- workloads ----------------------------------------------------------------------------------------------------


def test_ragged_lengths_are_log_uniform():
    ragged = WORKLOADS["ragged"].shapes
    assert all(16 <= s.prompt <= 256 and 8 <= s.generated <= 256 for s in ragged)
    # half of the values are below the geometric mean of the range
    assert 35 <= sum(s.prompt < 64 for s in ragged) <= 61
    assert 35 <= sum(s.generated < 45 for s in ragged) <= 61


def test_every_request_fits_its_context_which_llama_cpp_does_not_round():
    for workload in WORKLOADS.values():
        assert workload.n_ctx % 256 == 0
        assert all(s.prompt + s.generated <= workload.n_ctx for s in workload.shapes), workload.name


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_jobs_have_the_lengths_and_fresh_ids(name):
    workload = WORKLOADS[name]
    first = workload.jobs(random.Random(1), N_VOCAB)
    second = workload.jobs(random.Random(2), N_VOCAB)
    assert [(len(job.prompt), job.generate) for job in first] == [(s.prompt, s.generated) for s in workload.shapes]
    assert all(300 <= token < N_VOCAB - 300 for job in first for token in job.prompt)
    assert {tuple(j.prompt[:16]) for j in first}.isdisjoint(tuple(j.prompt[:16]) for j in second)
    assert first == workload.jobs(random.Random(1), N_VOCAB)


def test_a_shared_prefix_is_shared_and_nothing_else():
    jobs = WORKLOADS["shared prefix"].jobs(random.Random(1), N_VOCAB)
    assert len({tuple(job.prompt[:512]) for job in jobs}) == 1
    assert len({tuple(job.prompt[512:]) for job in jobs}) == 32


def test_warm_caches_hold_the_shared_part_and_nothing_else():
    for name, n in (("shared prefix", 0), ("shared prefix, warm", 32)):
        workload = WORKLOADS[name]
        jobs = workload.jobs(random.Random(1), N_VOCAB)
        earlier = workload.earlier(jobs, random.Random(2), N_VOCAB)
        assert len(earlier) == n
        for before, job in zip(earlier, jobs, strict=False):
            assert before.prompt[:512] == job.prompt[:512]
            assert before.prompt[512:] != job.prompt[512:]
            assert len(before.prompt) == len(job.prompt)


def test_a_second_turn_comes_after_its_first():
    workload = WORKLOADS["second turn, hybrid"]
    [job] = workload.jobs(random.Random(1), N_VOCAB)
    [earlier] = workload.earlier([job], random.Random(2), N_VOCAB)
    assert earlier.prompt == job.prompt[:2000]
    assert len(job.prompt) == 2100


def test_first_tokens_are_those_of_the_long_prompts_or_of_all():
    jobs = [Job([1], 3, 0.0, True), Job([1], 2, 0.0, False), Job([1], 2, 0.0, False)]
    found = Result(9.0, [], times_s=[[0.5, 1.0], [3.0, 4.0], [6.0]], began_s=[0.1, 1.0, 2.0])
    assert first_token_s(found, jobs) == 3.0
    assert first_token_s(found, [dataclasses.replace(job, talker=True) for job in jobs]) == pytest.approx(6.4 / 3)
    assert first_token_s(Result(9.0, [1, 1, 1]), jobs) is None


def test_a_cut_workload_is_shorter_and_of_the_same_kind():
    for workload in WORKLOADS.values():
        cut = workload.cut()
        assert cut.n_generated < 0.5 * workload.n_generated
        assert any(s.talker for s in cut.shapes)
        assert any(not s.talker for s in cut.shapes) == any(not s.talker for s in workload.shapes)
        assert len(cut.shapes) >= min(18, len(workload.shapes))


def test_the_loop_runs_requests_of_all_lengths():
    ragged = WORKLOADS["ragged"]
    some = ragged.every(8)
    assert len(some.shapes) == 12
    mean = statistics.mean(s.generated for s in ragged.shapes)
    assert statistics.mean(s.generated for s in some.shapes) == pytest.approx(mean, rel=0.1)
    assert not LlamaLoop().applies(WORKLOADS["long prompt among talkers"])


# --- measurements -------------------------------------------------------------------------------------------------


def test_gaps_are_those_of_talkers_and_p95_is_by_nearest_rank():
    jobs = [Job([1], 3, 0.0, True), Job([1], 2, 0.0, False), Job([1], 2, 0.0, True)]
    found = gaps([[1.0, 1.5, 2.5], [0.0, 9.0], [4.0, 4.25]], jobs)
    assert found == [0.5, 1.0, 0.25]
    assert Result(1.0, [1], [i / 100 for i in range(1, 101)]).p95_gap_s == 0.95
    assert Result(1.0, [1], [3.0]).p95_gap_s == 3.0
    assert Result(1.0, [1]).p95_gap_s is None


def test_a_peer_that_stops_early_is_refused():
    jobs = [Job([1], 100, 0.0, True)] * 2
    check_tokens([100, 99], jobs)
    with pytest.raises(PeerFailure, match="150 of 200 tokens"):
        check_tokens([100, 50], jobs)


def test_peers_do_not_inherit_our_packages():
    assert environment({"PYTHONPATH": "x", "VIRTUAL_ENV": "y", "PATH": "/bin", "GOMP_SPINCOUNT": "7"}) == {
        "PATH": "/bin",
        "GOMP_SPINCOUNT": "7",  # set by the user
    }


class FakePeer:
    """Returns the speeds that it was made with, one in each round. A text in place of a speed is a failure."""

    def __init__(self, name, speeds, called):
        self.name, self.speeds, self.called = name, list(speeds), called

    def applies(self, workload):
        return workload.name != "not mine"

    def measure(self, setup, workload, rng):
        self.called.append((self.name, rng.random()))
        speed = self.speeds.pop(0)
        if isinstance(speed, str):
            raise PeerFailure(speed)
        return result(speed)


def run(peers, n=3, names=("w",)):
    setup = Setup({}, {}, None, None, None, None, None, 2, 1.0)
    workloads = [Workload(name, "tiny", (Shape(1, 1),), 256) for name in names]
    said = []
    found = rounds.run(setup, workloads, peers, n, say=said.append, after_round=lambda series: None)
    return found, said


def test_rounds_alternate_with_the_same_ids_for_all_peers():
    called = []
    run([FakePeer("a", [1, 1, 1], called), FakePeer("b", [1, 1, 1], called)])
    assert [name for name, _ in called] == ["a", "b", "b", "a", "a", "b"]
    ids = [draw for _, draw in called]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_a_peer_that_fails_is_reported_and_does_not_sink_the_run():
    called = []
    found, said = run([FakePeer("a", [1, 2, 3], called), FakePeer("b", [5, "it crashed"], called)])
    assert [r.tokens_per_s for r in found[0].results] == [1, 2, 3]
    assert (len(found[1].results), found[1].failure) == (1, "it crashed")
    assert [name for name, _ in called].count("b") == 2
    assert any("it crashed" in line for line in said)


def test_a_peer_is_left_out_where_it_does_not_apply():
    found, _ = run([FakePeer("a", [1], [])], n=1, names=("not mine", "w"))
    assert [(row.peer, row.workload) for row in found] == [("a", "w")]


# --- best flags ---------------------------------------------------------------------------------------------------


def test_the_grid_holds_the_defaults_and_every_combination():
    combinations = grid.combinations()
    assert len(set(combinations)) == len(combinations) == 9
    assert () in combinations
    assert grid.USUAL in combinations


def test_the_best_flags_are_the_fastest_or_the_smoothest():
    fast, smooth, early = ("-kvu",), ("-no-kvu",), ("-ub", "2048")
    figures = {
        fast: dataclasses.replace(result(100, gaps_s=[0.5]), first_token_s=3.0),
        smooth: dataclasses.replace(result(50, gaps_s=[0.1]), first_token_s=2.0),
        early: dataclasses.replace(result(60, gaps_s=[0.3]), first_token_s=1.0),
    }
    assert grid.choose(WORKLOADS["burst"], figures) == fast
    assert grid.choose(WORKLOADS["long prompt among talkers"], figures) == smooth
    assert grid.choose(WORKLOADS["one long prompt"], figures) == early


def test_best_flags_are_remembered_for_their_build_only(tmp_path):
    path = tmp_path / "flags.json"
    wanted = ("-kvu", "-fa", "on", "--cache-ram", "0", "-ub", "2048")

    limits = []

    def measure(flags, workload, timeout_s):
        assert workload.n_generated < WORKLOADS["burst"].n_generated
        limits.append(timeout_s)
        if "off" in flags:
            raise PeerFailure("no")
        return result(9.0 if flags == wanted else 3.0)

    best = grid.Remembered(path, "one build")
    assert best.flags("burst") == grid.USUAL
    best.search(WORKLOADS["burst"], measure, lambda text: None)
    assert best.flags("burst") == wanted
    assert len(best.found["burst"]["failed"]) == 4
    assert limits[0] == float("inf") > limits[1]  # a setting that is much slower than the best so far is stopped early
    again = grid.Remembered(path, "one build")
    assert (again.flags("burst"), again.flags("tiny")) == (wanted, grid.USUAL)
    assert grid.Remembered(path, "another build").found == {}


# --- the limit ----------------------------------------------------------------------------------------------------


def test_rows_of_steps_by_hand():
    # steps 4, 3, 2, 1 on two slots, longest first: 4 and 3 begin, then 2 after step 3, and 1 after step 4
    assert limit.rows_of_steps([5, 4, 3, 2], 2) == {2: 5}
    assert limit.rows_of_steps([5, 2], 4) == {2: 1, 1: 3}
    assert limit.rows_of_steps([1, 1], 4) == {}


def test_the_staircase_adds_prefill_and_steps():
    shapes = [Shape(100, 5), Shape(100, 2)]
    steps = {1: 0.1, 2: 0.2, 4: 0.4}
    assert limit.staircase_seconds(shapes, 1000, steps, 4) == pytest.approx(0.2 + 0.2 + 3 * 0.1)
    assert limit.step_seconds(3, steps) == pytest.approx(0.3)


def test_the_limit_leaves_out_what_it_cannot_say():
    applies = [name for name, workload in WORKLOADS.items() if limit.Limit().applies(workload)]
    others = [f"{name}, {kind}" for kind in ("hybrid", "window") for name in ("burst", "shared prefix")]
    assert applies == ["burst", "burst, 1B Q4_K_M", "ragged", "shared prefix", "tiny", *others]


# --- the report ---------------------------------------------------------------------------------------------------

ROWS = [
    series(report.OURS, "burst", [230, 240, 250], memory=900),
    series(report.STOCK, "burst", [90, 100, 110], memory=1000),
    series(report.PATCHED_BEST, "burst", [190, 200, 210], memory=1000),
    series(report.LOOP, "burst", [60, 60, 60]),
    rounds.Series("xllamacpp", "burst", failure="it ended with SIGILL"),
]


def test_ratios_are_of_medians_and_carry_their_targets():
    found = {(c.peer, c.figure): c for c in report.compare(ROWS)}
    best = found[report.PATCHED_BEST, "tokens/s"]
    assert (best.ratio, best.target, best.met) == (1.2, 1.15, True)
    stock = found[report.STOCK, "tokens/s"]
    assert (stock.ratio, stock.target, stock.met) == (2.4, 2.5, False)
    loop = found[report.LOOP, "tokens/s"]
    assert (loop.ratio, loop.target, loop.met) == (4.0, 4.5, False)
    memory = found[report.STOCK, "memory"]
    assert (memory.ratio, memory.met) == (0.9, True)
    assert ("xllamacpp", "tokens/s") not in found


def test_a_gap_must_be_at_most_half():
    name = "long prompt among talkers"
    rows = [
        series(report.OURS, name, [100], gaps_s=[0.2] * 9),
        series(report.STOCK_BEST, name, [100], gaps_s=[0.3] * 9),
        series(report.STOCK, name, [100], gaps_s=[0.5] * 9),
    ]
    met = {c.peer: c.met for c in report.compare(rows) if c.figure == "p95 gap"}
    assert met == {report.STOCK_BEST: False, report.STOCK: True}


def test_an_early_first_token_has_its_target():
    name = "one long prompt"
    rows = [
        rounds.Series(peer, name, [dataclasses.replace(result(10, gaps_s=[0.1]), first_token_s=first)])
        for peer, first in ((report.OURS, 3.0), (report.STOCK, 4.5), (report.STOCK_BEST, 3.6), (report.PATCHED, 2.0))
    ]
    met = {c.peer: c.met for c in report.compare(rows) if c.figure == "first token"}
    assert met == {report.STOCK: True, report.STOCK_BEST: False, report.PATCHED: None}
    assert {c.met for c in report.compare(rows) if c.figure == "p95 gap"} == {None}
    assert report.document({}, {}, rows, {})["series"][1]["median"]["first_token_s"] == 4.5


def test_every_target_names_a_workload_and_a_peer():
    assert set(report.TARGETS) == set(WORKLOADS)
    assert {*report.FIRST_TOKENS, *report.GAPS} <= set(WORKLOADS)
    assert {p for t in report.TARGETS.values() for p in t} <= {*report.SERVERS, report.LOOP, report.LIMIT}


def test_the_table_shows_medians_ratios_and_failures():
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(ROWS, report.compare(ROWS), "burst"))
    text = console.export_text()
    console.file.close()
    assert "1.20×" in text
    assert "1.15 ✓" in text
    assert "llama-server, stock" in text
    assert "2.50 ✗" in text
    assert "4.50 ✗" in text
    assert "SIGILL" in text


def test_the_document_is_json_with_every_round():
    rows = [series(report.OURS, "burst", [100, 300, 200], folder="/home/me", counts={"decode_calls": 9}, load_s=1.0)]
    document = json.loads(json.dumps(report.document({"command": "x"}, {"rounds": 3}, rows, {}), allow_nan=False))
    [row] = document["series"]
    assert row["median"]["tokens_per_s"] == 200
    assert [r["tokens_per_s"] for r in row["rounds"]] == [100, 300, 200]
    assert row["rounds"][0]["counts"] == {"decode_calls": 9}
    assert row["facts"] == {"load_s": 1.0}
    assert document["command"] == "x"


def test_the_picture_has_a_panel_a_workload(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    rows = [*ROWS, series(report.OURS, "tiny", [1000.0])]
    fig = plot.figure(rows, "an invented machine")
    assert [axes.get_title(loc="left") for axes in fig.axes] == ["burst", "tiny"]
    assert len(fig.axes[0].patches) == 4  # no bar for a failure
    plot.draw(rows, "an invented machine", tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_idle_figures_have_their_targets():
    ours = [idle.Idle(0.1, 1.0, 0.5, 0.11), idle.Idle(0.1, 1.2, 0.5, 0.13), idle.Idle(0.1, 9.0, 0.5, 0.12)]
    loop = [idle.Idle(0.1, 0.8, 0.5, 0.10)]
    found = idle.document(ours, loop)
    assert (found["ttft_ratio"]["value"], found["ttft_ratio"]["met"]) == (1.2, False)
    assert (found["more_load_s"]["value"], found["more_load_s"]["met"]) == (0.4, False)


# --- comparison with another revision -----------------------------------------------------------------------------


def test_the_interval_holds_the_median_and_narrows_with_pairs():
    rng = random.Random(3)
    few = [1.1 + rng.gauss(0, 0.05) for _ in range(10)]
    many = [1.1 + rng.gauss(0, 0.05) for _ in range(200)]
    low, high = pairs.interval(few)
    assert low <= statistics.median(few) <= high
    assert min(few) <= low < high <= max(few)
    lower, higher = pairs.interval(many)
    assert higher - lower < high - low
    assert lower < statistics.median(many) < higher
    assert pairs.interval([1.0] * 10) == (1.0, 1.0)


def test_the_interval_covers_as_often_as_it_says():
    rng = random.Random(4)
    covered = 0
    for number in range(100):
        low, high = pairs.interval([rng.gauss(1.0, 0.1) for _ in range(10)], seed=number)
        covered += low <= 1.0 <= high
    assert covered >= 85  # 95 expected, three standard deviations are 6.5; the bootstrap is a bit narrow for ten pairs


@pytest.mark.parametrize(
    ("low", "high", "said"), [(1.01, 1.2, "faster"), (0.8, 0.99, "slower"), (0.9, 1.1, "no difference shown")]
)
def test_the_verdict(low, high, said):
    assert pairs.verdict(low, high) == said


def test_an_unknown_revision_is_refused():
    with pytest.raises(PeerFailure, match="no-such-revision"):
        ab.unpack("no-such-revision")


def test_the_programs_are_built_as_the_wheel_but_for_what_is_built():
    plan = Plan("cpu", ("-DGGML_NATIVE=ON", *recipe.FLAGS, "-DGGML_LTO=ON"), {}, {}, "a compiler", "a cpu", {})
    flags = llama_programs.flags(plan)
    assert {"-DGGML_NATIVE=ON", "-DGGML_LTO=ON", "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_OPENSSL=OFF"} <= set(flags)
    assert {"-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_COMMON=OFF"}.isdisjoint(flags)
    assert llama_programs.folder(plan.key).parts[-3:] == ("programs", plan.key, "bin")


def test_programs_of_another_recipe_are_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path))
    plan = Plan("cpu", recipe.FLAGS, {}, {}, "a compiler", "a cpu", {})
    folder = llama_programs.folder(plan.key)
    folder.mkdir(parents=True)
    for name in llama_programs.PROGRAMS:
        (folder / name).touch()
    assert not llama_programs.is_current(plan)
    (folder / MARKER).write_text(llama_programs.marker(plan), encoding="utf-8")
    assert llama_programs.programs(plan) == folder
    (folder / MARKER).write_text("older flags\n", encoding="utf-8")
    assert not llama_programs.is_current(plan)


def all_patches() -> Plan:
    patches = {patch.name: "a hash" for patch in source.patches()}
    return Plan("cpu", recipe.FLAGS, patches, {"fattn-block.h": "a hash"}, "a compiler", "a cpu", {})


def test_the_stock_programs_are_built_from_the_source_with_the_needed_patches_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    applied, commands = [], []

    def run_logged(command, log, title, environment=None, display=None):
        commands.append([str(part) for part in command])
        if "--build" in command:
            made = Path(command[command.index("--build") + 1]) / "bin"
            made.mkdir(parents=True)
            for name in llama_programs.PROGRAMS:
                (made / name).write_text(" ".join(applied))
        return 0

    monkeypatch.setattr(recipe, "run_logged", run_logged)
    monkeypatch.setattr(recipe, "with_cmake", lambda place, log: dict(os.environ))
    monkeypatch.setattr(source, "fetch", lambda log: tmp_path)
    monkeypatch.setattr(source, "unpack", lambda package, folder: folder)
    monkeypatch.setattr(source, "apply", lambda patch, tree: applied.append(patch.name))
    monkeypatch.setattr(source, "copy_kernels", lambda tree: applied.append("kernels"))
    folder = stock.stock_programs(all_patches())
    assert applied == list(stock.NEEDED)
    assert (folder / "llama-server").read_text() == " ".join(stock.NEEDED)
    assert {"-DLLAMA_BUILD_SERVER=ON", "-DBUILD_SHARED_LIBS=OFF"} <= set(commands[0])
    assert commands[1][-3:] == ["--target", *llama_programs.PROGRAMS]
    assert json.loads((folder / MARKER).read_text().split("\n-D")[0])["patches"].keys() == set(stock.NEEDED)
    assert stock.stock_programs(all_patches()) == folder  # from the cache
    assert len(commands) == 2
    assert folder != llama_programs.folder(all_patches().key)  # both builds are kept


def test_a_failed_build_of_the_stock_programs_names_its_log_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(recipe, "with_cmake", lambda place, log: dict(os.environ))
    monkeypatch.setattr(recipe, "run_logged", lambda command, log, title, environment=None, display=None: 1)
    monkeypatch.setattr(stock, "tree", lambda log, folder: folder)
    with pytest.raises(SetupFailure, match=r"llama-server and llama-batched-bench failed: .* \(log: .*programs-"):
        stock.stock_programs(all_patches())
    assert not llama_programs.folder(stock.plan_of(all_patches()).key).exists()


def test_the_stock_server_is_that_of_its_folder_and_says_its_patches(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(servers, "Program", lambda name, command, *_, **__: started.append((name, command)))
    monkeypatch.setattr(servers, "_up", lambda program, port, health, facts: facts)
    setup = Setup(
        {"synth": Model(tmp_path, 9, ())}, {}, tmp_path, None, tmp_path / "ours", None, tmp_path, 2, 1.0,
        stock=tmp_path / "stock",
    )  # fmt: skip
    best = grid.Remembered(tmp_path / "flags.json", "a build")
    made = make_peers(report.SERVERS, {report.STOCK_BEST: best, report.PATCHED_BEST: best}, quick=False)
    said = [peer.open(setup, WORKLOADS["burst"]) for peer in made]
    assert [name for name, _ in started] == list(report.SERVERS)
    assert [command[0].parent.name for _, command in started] == ["stock", "stock", "ours", "ours"]
    assert [facts.get("patches") for facts in said] == [list(stock.NEEDED)] * 2 + [None] * 2
    assert [grid.USUAL[0] in facts["flags"] for facts in said] == [False, True, False, True]
    with pytest.raises(PeerFailure, match="llama-server is not built without our patches"):
        made[0].open(dataclasses.replace(setup, stock=None), WORKLOADS["burst"])


def test_best_flags_are_searched_once_for_each_build_of_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path))
    setup = Setup({}, {}, tmp_path, None, tmp_path / "a" / "bin", None, tmp_path, 2, 9.0, stock=tmp_path / "b" / "bin")
    ran = []

    def measure(peer, setup, workload, rng, runs):
        ran.append(peer.stock)
        return result(9.0 if "2048" in peer.flags else 3.0)

    monkeypatch.setattr(servers, "measure", measure)
    found = servers.remembered(setup, stock=True)
    servers.search_flags(setup, [WORKLOADS["burst"]], found, ran.append, stock=True)
    assert ran.count(True) == len(grid.combinations())
    assert "2048" in servers.remembered(setup, stock=True).flags("burst")
    assert servers.remembered(setup, stock=False).found == {}
    ran.clear()
    servers.search_flags(setup, [WORKLOADS["burst"]], servers.remembered(setup, stock=True), ran.append, stock=True)
    assert ran == []
