"""The content of the wheels: the CPU variants, the dependencies of a release, the key of a build."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from llamabatch.native_build import sampler_library, source
from llamabatch.native_build.tools import SetupFailure
from native_patches import variants, wheels
from native_patches.packaging import hatch_metadata

ROOT = Path(__file__).parents[3]
LIST = """\
if (GGML_CPU_ALL_VARIANTS)
    if (GGML_SYSTEM_ARCH STREQUAL "x86")
        ggml_add_cpu_backend_variant(x64)
        ggml_add_cpu_backend_variant(haswell   SSE42 AVX F16C FMA AVX2 BMI2)
        ggml_add_cpu_backend_variant(zen4      SSE42 AVX)
    endif()
elseif (GGML_CPU)
    ggml_add_cpu_backend_variant_impl("")
endif()
"""


@pytest.fixture
def tree(tmp_path):
    place = tmp_path / "vendor" / "llama.cpp" / "ggml" / "src"
    place.mkdir(parents=True)
    (place / "CMakeLists.txt").write_text(LIST)
    return tmp_path, place / "CMakeLists.txt"


def test_our_list_of_variants_takes_the_place_of_ggmls(tree):
    folder, file = tree
    variants.write_list(folder, variants.chosen("x86_64", "haswell,x64"))
    lines = [line.strip() for line in file.read_text().splitlines() if "variant(" in line]
    assert lines == [
        "ggml_add_cpu_backend_variant(haswell SSE42 AVX F16C FMA AVX2 BMI2)",
        "ggml_add_cpu_backend_variant(x64)",
    ]
    assert 'ggml_add_cpu_backend_variant_impl("")' in file.read_text()


def test_another_way_of_listing_them_stops(tree):
    folder, file = tree
    file.write_text(LIST.replace("elseif (GGML_CPU)", "else()"))
    with pytest.raises(SetupFailure, match="adapt variants"):
        variants.write_list(folder, variants.chosen("x86_64", "haswell"))


def test_unknown_names_are_refused_with_the_list():
    with pytest.raises(SetupFailure, match=r"no CPU variant 'zen9' for x86_64: choose from alderlake, .*x64"):
        variants.chosen("x86_64", "haswell,zen9")
    with pytest.raises(SetupFailure, match="no CPU variants for 'riscv64'"):
        variants.chosen("riscv64")


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_a_better_variant_never_runs_where_the_next_one_for_its_kind_does_not(arch):
    """The list is read from the best variant on: a CPU must not get a worse variant that comes before a better one."""
    found = variants.VARIANTS[arch]
    assert found[-1].needs == []
    for place, better in enumerate(found):
        for worse in found[place + 1 :]:
            assert not set(better.sets) < set(worse.sets), f"{worse.name} has all of {better.name} and comes later"


def test_the_needs_are_in_the_words_of_linux():
    by_name = {each.name: set(each.needs) for each in variants.VARIANTS["x86_64"]}
    assert by_name["haswell"] == {"sse4_2", "avx", "f16c", "fma", "avx2", "bmi2"}
    assert {"avx512f", "avx512bw", "avx512_vnni"} <= by_name["cascadelake"]
    assert {"amx_tile", "amx_int8", "avx512vbmi"} <= by_name["sapphirerapids"]


def test_the_marker_names_file_and_needs_of_each_variant():
    portable = wheels.Portable("x86_64", variants.chosen("x86_64", "haswell,x64"))
    marker = json.loads(portable.marker("1.2.3"))
    assert [each["name"] for each in marker["variants"]] == ["haswell", "x64"]
    assert marker["variants"][0]["file"] == "libllamabatch-ggml-cpu-haswell.so"
    assert set(marker["patches"]) == {path.name for path in source.patches()}
    assert set(marker["kernels"]) == set(source.KERNELS)


def test_the_key_follows_what_is_compiled_and_not_the_release(monkeypatch, tmp_path):
    portable = wheels.Portable("x86_64", variants.chosen("x86_64"))
    key = portable.key
    monkeypatch.setattr(wheels, "release", lambda: "9.9.9")
    assert portable.key == key
    assert wheels.Portable("x86_64", variants.chosen("x86_64", "x64")).key != key
    copy = tmp_path / "portable"
    shutil.copytree(wheels.PORTABLE, copy)
    monkeypatch.setattr(wheels, "PORTABLE", copy)
    assert portable.key == key
    (copy / "team.c").write_text("changed")
    assert portable.key != key


def test_the_compilers_leave_no_path_of_this_machine(tmp_path):
    zig = tmp_path / "to ols" / "lib" / "python3.11" / "site-packages" / "ziglang" / "zig"
    zig.parent.mkdir(parents=True)
    zig.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    zig.chmod(0o755)
    portable = wheels.Portable("aarch64", variants.chosen("aarch64"))
    made = wheels._compilers(portable, tmp_path / "to ols" / "bin", tmp_path)
    told = [str(made["CXX_COMPILER"]), "-march=armv8.2-a+fp16", "a b.cpp"]
    assert subprocess.run(told, capture_output=True, text=True, check=True).stdout.splitlines() == [
        "c++", "-target", portable.target, f"-ffile-prefix-map={tmp_path}=.", "-mcpu=generic+v8_2a+fullfp16", "a b.cpp",
    ]  # fmt: skip
    assert subprocess.run([made["AR"], "rc"], capture_output=True, text=True, check=True).stdout.split() == ["ar", "rc"]


def test_a_build_whose_sources_change_meanwhile_is_not_kept(monkeypatch, tmp_path):
    copy = tmp_path / "portable"
    shutil.copytree(wheels.PORTABLE, copy)
    monkeypatch.setattr(wheels, "PORTABLE", copy)
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(wheels, "require_space", lambda *ignored: None)
    monkeypatch.setattr(wheels, "tool_folder", lambda log: tmp_path)
    monkeypatch.setattr(wheels.source, "patched_tree", lambda log, place: place)
    monkeypatch.setattr(wheels.variants, "write_list", lambda *ignored: None)
    monkeypatch.setattr(wheels, "_compilers", lambda *ignored: {})
    monkeypatch.setattr(wheels, "_compile_sampler", lambda *ignored: None)
    portable = wheels.Portable("x86_64", variants.chosen("x86_64", "x64"))
    changes = ["changed", None]

    def compile_(portable, tree, target, *ignored):
        target.mkdir()
        for name in (wheels.library_of(portable.variants[0]), "libllamabatch-llama.so"):
            (target / name).touch()
        if change := changes.pop(0):
            (copy / "team.c").write_text(change)

    monkeypatch.setattr(wheels, "_compile", compile_)
    with pytest.raises(SetupFailure, match="has changed since it began"):
        wheels.portable_libraries(portable)
    assert not [path for path in (tmp_path / "cache" / "portable").iterdir() if path.is_dir()]
    assert wheels.portable_libraries(portable) == portable.folder
    assert portable.folder.is_dir()


def test_the_distribution_has_the_version_of_llamabatch():
    version = {}
    exec((ROOT / "llamabatch" / "utils" / "version.py").read_text(encoding="utf-8"), version)
    assert wheels.release() == version["__version__"]


WHEELS = (
    "sys_platform == 'linux' and os_name == 'posix' and (platform_machine == 'x86_64' or platform_machine == 'arm')"
)


@pytest.mark.parametrize("system", ["linux", "darwin"])
@pytest.mark.parametrize("machine", ["x86_64", "arm", "riscv64"])
def test_a_release_wants_exactly_one_llama_cpp(system, machine):
    where = {"sys_platform": system, "os_name": "posix", "platform_machine": machine}
    texts = hatch_metadata.llama_cpp("1.2.3", "llama-cpp-python>=0.3.36,<0.4", WHEELS, is_release=True)
    [wanted] = [each.name for each in map(Requirement, texts) if each.marker.evaluate(where)]
    has_wheel = system == "linux" and machine != "riscv64"
    assert wanted == ("llamabatch-llama" if has_wheel else "llama-cpp-python")
    assert texts[0].startswith("llamabatch-llama==1.2.3;")


def test_a_checkout_wants_llama_cpp_python_alone():
    source_text = "llama-cpp-python>=0.3.36,<0.4"
    assert hatch_metadata.llama_cpp("1.2.3", source_text, WHEELS, is_release=False) == [source_text]


TEAM_CHECK = r"""
#include "omp.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void regions(int most) {
    for (int rep = 0; rep < REGIONS; rep++) {
        const int n = 1 + rep % most;
        int sum = 0, once = 0, bad = 0;
#pragma omp parallel num_threads(n)
        {
            __atomic_fetch_add(&sum, omp_get_thread_num() + 1, __ATOMIC_SEQ_CST);
#pragma omp single
            { __atomic_fetch_add(&once, 1, __ATOMIC_SEQ_CST); }
#pragma omp barrier
            if (sum != n * (n + 1) / 2 || omp_get_num_threads() != n) {
                bad = 1;
            }
#pragma omp single
            { __atomic_fetch_add(&once, 1, __ATOMIC_SEQ_CST); }
        }
        if (bad || once != 2 || sum != n * (n + 1) / 2) {
            printf("region %d with %d threads: sum %d, singles %d\n", rep, n, sum, once);
            exit(1);
        }
    }
}

static void * of_another_thread(void * unused) {
    (void) unused;
    regions(3);
    return NULL;
}

int main(void) {
    regions(4);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) { // each with workers of its own, which end with it
        pthread_create(&threads[i], NULL, of_another_thread, NULL);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
    }
    fflush(stdout);
    const pid_t child = fork(); // a fork has no workers
    if (child == 0) {
        regions(2);
        _exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    return status != 0;
}
"""


SHAKE = r"""
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

static inline unsigned shaken_add(atomic_uint * p, unsigned n) {
    static _Thread_local uint64_t seed;
    const unsigned old = atomic_fetch_add(p, n);
    seed = seed * 6364136223846793005u + (uintptr_t) p / 64 + old + 1;
    for (unsigned i = 0; i < seed >> 61; i++) {
        sched_yield();
    }
    return old;
}
#undef atomic_fetch_add
#define atomic_fetch_add(p, n) shaken_add(p, n)
"""

FAULT_CHECK = r"""
#include "omp.h"
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

static void seen(int number) {
    _exit(number == SIGSEGV ? 7 : 8);
}

int main(void) {
    signal(SIGSEGV, seen);
#pragma omp parallel num_threads(3)
    {
        if (omp_get_thread_num() == 2) {
            *(volatile int *) 8 = 1;
        }
    }
    return 0;
}
"""


def compiled(check, folder, *team_flags):
    """Compiles a check with our teams of threads, without libgomp. Returns the program."""
    (folder / "check.c").write_text(check)
    compiler = shutil.which("gcc") or shutil.which("cc")
    command = [compiler, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{wheels.PORTABLE}"]
    objects = []
    for path, flags in (
        (folder / "check.c", ["-fopenmp", "-Wno-array-bounds"]),
        (wheels.PORTABLE / "calls.c", ["-fopenmp"]),
        (wheels.PORTABLE / "team.c", team_flags),
    ):
        objects.append(str(folder / f"{path.stem}.o"))
        subprocess.run([*command, *flags, "-c", str(path), "-o", objects[-1]], check=True)
    subprocess.run([compiler, *objects, "-pthread", "-o", str(folder / "check")], check=True)
    return folder / "check"


@pytest.mark.skipif(not sampler_library.find_compiler(), reason="no compiler")
@pytest.mark.parametrize("spins", ["0", "3000"])
@pytest.mark.parametrize("shaken", [False, True])
def test_teams_of_threads_meet_at_barriers_from_several_threads_and_in_a_fork(tmp_path, spins, shaken):
    """If shaken, a thread yields after each atomic step: rare interleavings become common, so few regions suffice."""
    (tmp_path / "shake.h").write_text(SHAKE)
    shake = ["-include", str(tmp_path / "shake.h")] if shaken else []
    program = compiled(f"#define REGIONS {300 if shaken else 3000}\n{TEAM_CHECK}", tmp_path, *shake)
    done = subprocess.run([str(program)], env={"GOMP_SPINCOUNT": spins}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not sampler_library.find_compiler(), reason="no compiler")
def test_a_fault_in_a_worker_reaches_the_handler_of_the_program(tmp_path):
    program = compiled(FAULT_CHECK, tmp_path)
    assert subprocess.run([str(program)], capture_output=True, timeout=120, check=False).returncode == 7
