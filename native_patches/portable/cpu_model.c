// What Clang's clones of a function ask of its runtime library (compiler-rt), which zig's lacks: the abilities of this
// x86 CPU that the system has enabled. Only those that the sampler has clones for are filled in.

#include <cpuid.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

enum { AVX2 = 10, AVX512F = 15 }; // places of the bits, as in compiler-rt's and libgcc's cpuinfo.h

struct {
    unsigned vendor, type, subtype, features[1];
} __cpu_model = { 0, 0, 0, { 0 } };

int __cpu_indicator_init(void);
int __cpu_indicator_init(void) {
    unsigned a, b, c, d, low, high;
    if (__cpu_model.vendor || !__get_cpuid(1, &a, &b, &c, &d)) {
        return 0;
    }
    __cpu_model.vendor = 1;
    if (!(c & bit_OSXSAVE)) {
        return 0;
    }
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const int avx_is_on = (low & 0x6) == 0x6, avx512_is_on = (low & 0xe6) == 0xe6; // registers that are saved
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        __cpu_model.features[0] |= avx_is_on && (b & bit_AVX2) ? 1u << AVX2 : 0;
        __cpu_model.features[0] |= avx512_is_on && (b & bit_AVX512F) ? 1u << AVX512F : 0;
    }
    return 0;
}

#pragma GCC visibility pop
