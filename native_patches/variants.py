"""The CPU variants of the portable build: their instruction sets in ggml's names, and the CPU features of each set.

ggml compiles its whole CPU backend, with our kernels, once for each variant. ggml's own list has fifteen variants for
x86-64. This list leaves out variants whose additional instructions no kernel uses (VBMI). For ARM it adds i8mm without
SVE, which Apple's and Qualcomm's CPUs have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from llamabatch.native_build.tools import SetupFailure

_AVX2 = ("SSE42", "AVX", "F16C", "FMA", "AVX2", "BMI2")
_AVX512 = (*_AVX2, "AVX512")
_DOTPROD = ("DOTPROD", "FP16_VECTOR_ARITHMETIC")

# ggml's name of an instruction set -> Linux's names in /proc/cpuinfo. For ARM, the names include everything that the
# compiler may use. ggml asks it for a release of the architecture: armv8.2-a for dot products, armv8.6-a for i8mm.
_LINUX = {
    "SSE42": ("sse4_2",), "AVX": ("avx",), "F16C": ("f16c",), "FMA": ("fma",), "AVX2": ("avx2",), "BMI2": ("bmi2",),
    "AVX_VNNI": ("avx_vnni",), "AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "AVX512_VBMI": ("avx512vbmi",), "AVX512_VNNI": ("avx512_vnni",), "AVX512_BF16": ("avx512_bf16",),
    "AMX_TILE": ("amx_tile",), "AMX_INT8": ("amx_int8",), "AMX_BF16": ("amx_bf16",),
    "DOTPROD": ("asimddp", "atomics", "asimdrdm"), "FP16_VECTOR_ARITHMETIC": ("asimdhp", "fphp"),
    "MATMUL_INT8": ("i8mm", "bf16"), "SVE": ("sve",), "NOSVE": (), "SME": ("sme",),
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One build of the CPU backend.

    Attributes:
        sets: instruction sets in ggml's names.
    """

    name: str
    sets: tuple[str, ...] = ()

    @property
    def needs(self) -> list[str]:
        """The CPU features that the variant's code uses, in Linux's names."""
        return sorted({name for each in self.sets for name in _LINUX[each]})


# Best first: a CPU uses the first variant that it can run.
VARIANTS = {
    "x86_64": (
        Variant(
            "sapphirerapids",
            (*_AVX512, "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16", "AMX_TILE", "AMX_INT8", "AMX_BF16"),
        ),
        Variant("cooperlake", (*_AVX512, "AVX512_VNNI", "AVX512_BF16")),
        Variant("cascadelake", (*_AVX512, "AVX512_VNNI")),
        Variant("skylakex", _AVX512),
        Variant("alderlake", (*_AVX2, "AVX_VNNI")),
        Variant("haswell", _AVX2),
        Variant("sse42", ("SSE42",)),
        Variant("x64"),
    ),
    "aarch64": (
        Variant("armv8.6_sve", (*_DOTPROD, "MATMUL_INT8", "SVE")),
        Variant("armv8.6", (*_DOTPROD, "MATMUL_INT8")),
        Variant("armv8.2", _DOTPROD),
        Variant("armv8.0"),
    ),
    "arm64": (  # Apple's CPUs; nobody has built these yet
        Variant("apple_m4", ("DOTPROD", "MATMUL_INT8", "NOSVE", "SME")),
        Variant("apple_m2_m3", ("DOTPROD", "MATMUL_INT8")),
        Variant("apple_m1", ("DOTPROD",)),
    ),
}

_ENTRY = re.compile(r"^[ \t]*ggml_add_cpu_backend_variant\(.*\)[ \t]*\n", re.MULTILINE)
_PLACE = 'elseif (GGML_CPU)\n    ggml_add_cpu_backend_variant_impl("")\n'
_LIST = Path("vendor", "llama.cpp", "ggml", "src", "CMakeLists.txt")


def chosen(arch: str, names: str = "") -> tuple[Variant, ...]:
    """Returns the variants for an architecture, best first; with `names`, only these (separated by commas).

    Raises:
        SetupFailure: an unknown architecture or variant.
    """
    if arch not in VARIANTS:
        raise SetupFailure(f"There are no CPU variants for {arch!r}, only for {', '.join(VARIANTS)}.")
    if not names:
        return VARIANTS[arch]
    wanted = [name.strip() for name in names.split(",")]
    known = {variant.name for variant in VARIANTS[arch]}
    if unknown := [name for name in wanted if name not in known]:
        raise SetupFailure(
            f"There is no CPU variant {unknown[0]!r} for {arch}: choose from {', '.join(sorted(known))}."
        )
    return tuple(variant for variant in VARIANTS[arch] if variant.name in wanted)


def write_list(tree: Path, variants: tuple[Variant, ...]) -> None:
    """Replaces ggml's list of variants with these, in the unpacked source package at `tree`.

    Raises:
        SetupFailure: ggml does not list its variants in the expected way.
    """
    path = tree / _LIST
    text, n_removed = _ENTRY.subn("", path.read_text(encoding="utf-8"))
    if text.count(_PLACE) != 1 or n_removed < len(variants):
        raise SetupFailure(f"{_LIST} lists its CPU variants in another way than before: adapt variants.py.")
    entries = "".join(f"    ggml_add_cpu_backend_variant({' '.join((v.name, *v.sets))})\n" for v in variants)
    path.write_text(text.replace(_PLACE, entries + _PLACE), encoding="utf-8")
