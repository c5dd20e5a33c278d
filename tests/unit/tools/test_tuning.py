"""Tuning without a library: the choice among invented figures, and the text of a report."""

import io
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
from rich.console import Console

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError, EngineError
from llamabatch.gguf.shape import ModelShape
from llamabatch.planning.machine import Machine
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.planning.profile import Profile, ProfileKey
from llamabatch.tools.machine_facts import MachineFacts
from llamabatch.tools.processes import OthersUse
from llamabatch.tools.tune import children
from llamabatch.tools.tune import run as tuning
from llamabatch.tools.tune.choose import choose
from llamabatch.tools.tune.report import Report, document
from llamabatch.tools.tune.run import Settings, Tuner
from llamabatch.tools.tune.stages import LIBGOMP_SPINS, STAIRS, Job, Setting, config_of, llama_cpp_defaults, stages
from llamabatch.tools.tune.table import show
from llamabatch.utils.console import write_plot
from tests.unit.configs import resolved

FACTS = ModelFacts("small", 530_000_000, 24 * 2 * 64, 24 * 2 * 64, 896, 14, 151_936, 32_768)
RULED = resolved(flash_attn="off", extra_bufts="on", n_ctx=256, n_threads=2, n_threads_batch=2)
SETTING = Setting("on", 1000, "off", "f16", "f16", 512, 2, 2)


def rounds(*milliseconds):
    return tuple({"many": ms} for ms in milliseconds)


# --- the choice of a value ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "other", "taken"),
    [
        ((100, 100, 100), (98, 98, 98), False),  # within the margin
        ((100, 100, 100), (95, 95, 95), True),
        ((100, 130, 100), (95, 123, 95), True),  # both were slower in the second round
        ((100, 100, 100), (95, 80, 125), False),  # 5 % better in the median, but 25 % worse in one round
        ((100,), (50,), False),  # one round is no proof
        ((100, 100, 100), (50, 50), False),  # fewer rounds than the default are no proof
    ],
)
def test_only_what_beats_the_noise_is_taken(base, other, taken):
    assert (choose({"a": rounds(*base), "b": rounds(*other)}, "a").chosen == "b") is taken


def test_each_workload_counts_alike():
    base = ({"one": 1.0, "many": 100.0},) * 3
    slower_in_all = ({"one": 2.0, "many": 90.0},) * 3
    assert choose({"a": base, "b": slower_in_all}, "a").gains["b"] == pytest.approx((1 / 2 * 100 / 90) ** 0.5)


def test_of_equals_the_first_wins():
    choice = choose({"a": rounds(100, 100), "b": rounds(80, 80), "c": rounds(79, 79)}, "a")
    assert (choice.chosen, choice.changed) == ("b", True)
    assert choose({"a": rounds(100, 100), "b": rounds(80, 80), "c": rounds(60, 60)}, "a").chosen == "c"


def test_an_unmeasured_candidate_is_not_chosen():
    choice = choose({"a": rounds(100, 100), "b": ()}, "a")
    assert (choice.chosen, choice.changed, choice.gains["b"], choice.median("b")) == ("a", False, None, {})


# --- the values to try --------------------------------------------------------------------------------------------


def candidates(name, setting, cores=8, **facts):
    stage = next(s for s in stages(cores, RULED, 1024, **facts) if s.name == name)
    return stage.candidates(setting)


def test_the_rule_stands_first_and_nothing_impossible_is_tried():
    for stage in stages(8, RULED, 1024):
        ways = stage.candidates(SETTING)
        assert next(iter(ways.values())) == SETTING
        for setting in ways.values():
            config_of(RULED, setting, Job(8, (1,), 32, 1, 0.1))  # a wrong setting would raise ConfigError
    assert list(candidates("flash_attn", SETTING)) == ["off", "on"]
    gpu = replace(SETTING, flash_attn="auto")
    assert list(candidates("flash_attn", gpu)) == ["auto", "off"]
    quantised = replace(SETTING, type_v="q8_0", flash_attn="on")
    assert list(candidates("flash_attn", quantised)) == ["on"]
    assert candidates("type_k", SETTING)["q8_0, q8_0"].flash_attn == "on"
    assert list(candidates("extra_bufts", replace(SETTING, extra_bufts="off"))) == ["off"]
    assert {"2", "1", "4", "8"} <= set(candidates("n_threads", SETTING))
    assert list(stages(8, RULED, 256)[-1].candidates(SETTING)) == ["512", "256"]


def test_other_kernels_than_those_for_amx_are_tried_where_there_are_both():
    assert list(candidates("extra_bufts", SETTING)) == ["on", "off"]
    ways = candidates("extra_bufts", SETTING, amx=True)
    assert list(ways) == ["on", "on, no AMX", "off"]
    assert ways["on, no AMX"] == replace(SETTING, amx="off")
    assert list(candidates("extra_bufts", replace(SETTING, extra_bufts="off"), amx=True)) == ["off"]
    assert len({way.load for way in ways.values()}) == 3  # each value needs a process of its own
    assert [way.environment().get("GGML_CPU_AMX") for way in ways.values()] == [None, "0", None]
    assert {way.environment()["GOMP_SPINCOUNT"] for way in ways.values()} == {"1000"}


def test_defaults_of_llama_cpp():
    defaults = llama_cpp_defaults(replace(SETTING, n_threads=1), 2)
    assert (defaults.flash_attn, defaults.spins, defaults.n_threads) == ("auto", LIBGOMP_SPINS, 2)
    assert (defaults.type_k, defaults.extra_bufts) == ("f16", "on")


@pytest.mark.parametrize("bad", [{"seconds": 0}, {"seconds": "long"}, {"engine": {"type_k": "q3"}}, {"model": ""}])
def test_settings_are_checked(bad):
    with pytest.raises(ConfigError):
        Settings(**bad)


# --- the search ---------------------------------------------------------------------------------------------------


class Machines:
    """Children that invent figures: a base time, multiplied by a factor for each property of the setting."""

    def __init__(self, factors, broken=(), seconds_each=0.0):
        self.factors, self.broken, self.seconds_each = factors, broken, seconds_each
        self.now = 0.0
        self.asked = []

    def spins_matter(self, setting, job):
        return True

    def measure(self, setting, job):
        self.asked.append(setting)
        self.now += self.seconds_each
        properties = {f"{name}={value}" for name, value in vars(setting).items()}
        if properties & set(self.broken):
            raise EngineError("it cannot be")
        factor = 1.0
        for name in properties & set(self.factors):
            factor *= self.factors[name]
        p95 = {f"p95 {n}": 1.1 * (20 + n) * factor for n in job.rows}
        return {"prompt": 2 * factor, **{str(n): (20 + n) * factor for n in job.rows}, **p95}


class Silent:
    def start(self, title, share):
        self.shares = [*getattr(self, "shares", []), share]

    def advance(self, share):
        pass

    def end(self, outcome):
        pass


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, n_gpus=0: Machine(2, 32 * 2**30)))
    monkeypatch.setattr(tuning, "busy_neighbour", nullcontext)
    monkeypatch.setattr(tuning, "amx_can_be_off", lambda: True)

    def go(factors, broken=(), seconds_each=0.0, **settings):
        children = Machines(factors, broken, seconds_each)
        monkeypatch.setattr(time, "monotonic", lambda: children.now)
        progress = Silent()
        tuner = Tuner(Settings("m", **settings), RULED, FACTS, children, progress)
        results = tuner.choose_all()
        stairs, gain = tuner.staircase(), tuner.gain()
        assert sum(progress.shares) == pytest.approx(1)
        return tuner, results, stairs, gain

    return go


def test_each_machine_gets_what_is_fast_on_it(tune):
    assert tune({})[0].setting == SETTING
    flash = tune({"flash_attn=on": 0.5, "n_threads=1": 0.8})[0].setting
    assert flash == replace(SETTING, flash_attn="on", n_threads=1)
    waits = tune({"spins=10000": 0.7, "extra_bufts=off": 0.6, "n_ubatch=1024": 0.5})[0].setting
    assert waits == replace(SETTING, spins=10000, extra_bufts="off", n_ubatch=1024)
    assert tune({"amx=off": 0.8, "extra_bufts=off": 1.3})[0].setting == replace(SETTING, amx="off")


def test_later_questions_are_asked_with_earlier_answers(tune):
    tuner, *_ = tune({"extra_bufts=off": 0.5})
    first_off = next(i for i, s in enumerate(tuner._children.asked) if s.extra_bufts == "off")
    later = [s for s in tuner._children.asked[first_off:] if s.spins != 1000 and s.flash_attn == "off"]
    assert later
    assert {s.extra_bufts for s in later} == {"off"}


def test_cache_types_are_shown_but_taken_only_when_allowed(tune):
    fast = {"type_k=q8_0": 0.5}
    tuner, results, *_ = tune(fast)
    kv = next(r for r in results if r.only_on_request)
    assert kv.choice.gains["q8_0, f16"] == pytest.approx(2)
    assert (tuner.setting.type_k, tuner.setting.type_v) == ("f16", "f16")
    allowed = tune(fast, allow_numerics=True)[0].setting
    assert allowed.type_k == "q8_0"


def test_a_failed_candidate_is_named_and_not_chosen(tune):
    tuner, results, *_ = tune({"flash_attn=on": 0.5}, broken=["flash_attn=on"])
    assert tuner.setting.flash_attn == "off"
    assert results[1].failures == {"on": "it cannot be"}
    with pytest.raises(EngineError):
        tune({}, broken=["flash_attn=off"])


def test_a_candidate_far_behind_is_measured_once(tune):
    tuner, *_ = tune({"extra_bufts=off": 3.0})
    assert sum(s.extra_bufts == "off" for s in tuner._children.asked) == 1


def test_slots_for_a_latency_limit(tune):
    tuner, _, stairs, _ = tune({"flash_attn=on": 0.5}, p95_inter_token_ms=80.0)
    found = tuner.latency(stairs)
    # flash attention halves all times: 12 rows take 17.6 ms at p95; with 16 rows, 1 step of 16 has a prompt of 64 ms
    assert (found.rows, found.p95_ms) == (12, pytest.approx(17.6))
    assert tune({})[0].latency(stairs) is None


def test_a_limit_that_nothing_can_keep_is_refused_at_once(tune):
    with pytest.raises(ConfigError, match=r"the least that is possible here is 23\.1, with 1 row"):
        tune({}, p95_inter_token_ms=2.0)
    tuner, _, stairs, _ = tune({}, p95_inter_token_ms=10.0)
    with pytest.raises(ConfigError, match=r"p95_inter_token_ms is 10; the least that is possible here is 23\.1"):
        tuner.latency(stairs)


def test_when_the_time_is_over_the_rules_stand(tune):
    tuner, _, stairs, gain = tune({"flash_attn=on": 0.5}, seconds_each=100.0, seconds=10)
    assert tuner.cut_short
    assert tuner.setting == SETTING
    assert [stair.rows for stair in stairs] == list(STAIRS)
    assert all(gain.choice.median(label) for label in gain.choice.rounds)


# --- the report ---------------------------------------------------------------------------------------------------


@pytest.fixture
def report(tune, tmp_path):
    tuner, results, stairs, gain = tune({"flash_attn=on": 0.5, "flash_attn=auto": 0.9}, broken=["type_k=f32"])
    machine = MachineFacts("A CPU", 2, 2, 2**34, "an OS", ("CPU: A CPU",), {"llamabatch": "1"}, None)
    key = ProfileKey(ModelShape("q", "", "", "", "", "", 1, "", 1, 1), "A CPU", "", 2, "1", "f16", "f16")
    profile = Profile(key, "2026-01-02", "small [1]", flash_attn="on", stairs=stairs)
    used = OthersUse(35.0, cores=2)
    return Report(machine, tuple(results), stairs, gain, tuner.many, profile, tmp_path / "p.json", 12.0, True, used)


def test_the_table_tells_what_was_chosen_and_gained(report):
    out = io.StringIO()
    show(report, Console(file=out, width=200))
    text = out.getvalue()
    assert "small [1] on A CPU" in text
    assert [line.split()[-2:] for line in text.splitlines() if " on ◀" in line][1] == ["×", "±0.00"]
    assert "2.00 ×" in text
    assert "f32, f32 failed: it cannot be" in text
    assert "more do not pay" in text
    assert "Meanwhile other processes used 35 % of the CPU: the profile holds for a machine with such a load" in text
    assert "1.80 ×" in text  # 0.9 / 0.5, compared with llama.cpp's defaults
    assert str(report.file) in text


def test_a_profile_that_was_not_kept_is_not_promised(report):
    out = io.StringIO()
    dropped = replace(report, file=None)
    show(dropped, Console(file=out, width=200))
    assert "used 35 % of the CPU, so no profile is kept" in out.getvalue()
    assert "from now on" not in out.getvalue()
    assert "llama.cpp's" not in out.getvalue(), "nothing is gained"
    assert document(dropped)["kept"] is False


@pytest.mark.parametrize("width", [80, 40])
def test_no_word_breaks_and_no_figure_is_lost_on_a_terminal(report, width):
    plain, narrow = (
        Console(file=io.StringIO(), width=columns, force_terminal=columns < 200, color_system=None)
        for columns in (200, width)
    )
    for console in (plain, narrow):
        show(report, console)
    shown = narrow.file.getvalue()
    assert all(len(line) <= width or len(line.split()) == 1 for line in shown.splitlines())
    assert {word for word in plain.file.getvalue().split() if "─" not in word and "█" not in word} <= set(shown.split())


def test_the_document_is_whole_and_strict_json(report):
    text = json.dumps(document(report), allow_nan=False)
    read = json.loads(text)
    assert read["against_llama_cpp"]["speed_up"]["many"] == pytest.approx(1.8)
    assert Profile.from_json(read["profile"]) == report.profile
    assert read["questions"][1]["chosen"] == "on"
    assert [stair["rows"] for stair in read["stairs"]] == list(STAIRS)


def test_the_limit_in_table_document_and_picture(report):
    from dataclasses import replace as changed

    from llamabatch.tools.tune.choose import choose_rows

    latency = choose_rows(report.stairs, 2.0, 200.0)
    limited = changed(report, latency=latency)
    out = io.StringIO()
    show(limited, Console(file=out, width=200))
    assert f"{latency.rows} slots keep 200 ms between two tokens at p95" in out.getvalue()
    assert "◀ the most within 200 ms" in out.getvalue()
    read = json.loads(json.dumps(document(limited), allow_nan=False))["latency"]
    assert (read["p95_inter_token_ms"], read["rows"]) == (200.0, latency.rows)
    assert [gap["rows"] for gap in read["gaps"]] == [stair.rows for stair in report.stairs]
    assert document(report)["latency"] is None
    pytest.importorskip("matplotlib")
    from llamabatch.tools.tune.plot import figure

    assert "keep 200 ms between tokens at p95" in figure(limited).subfigs[0].axes[0].get_title()


def test_the_picture(report, tmp_path):
    pytest.importorskip("matplotlib")
    from llamabatch.tools.tune.plot import figure

    write_plot("llamabatch.tools.tune.plot", report, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    stairs = figure(report).subfigs[0].axes[0].lines[0]
    assert list(stairs.get_xdata()) == list(STAIRS)


@pytest.mark.parametrize(
    ("code", "seconds", "ended"),
    [
        ("import time; time.sleep(600)", 0.05, "no answer within"),
        ("raise SystemExit(3)", 60, "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60, "SIGSEGV"),
    ],
)
def test_a_measuring_process_that_gives_no_answer_is_ended(code, seconds, ended, monkeypatch):
    monkeypatch.setattr(children, "_ANSWER_TIMEOUT_S", seconds)
    monkeypatch.setattr(children, "command", lambda module: [sys.executable, "-c", code])
    with pytest.raises(EngineError, match=ended):
        children._Child(EngineConfig("tiny"), {})
