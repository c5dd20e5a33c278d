// How many products a second this CPU's instructions for 8-bit integers, BF16 and floats make, from registers alone.
//
//     cc -O3 -march=native -pthread roofs.c -o roofs && ./roofs THREADS
//
// It prints a JSON object: products a second of all threads, the fastest of three, for the instructions that the CPU has.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__AVX512F__) || defined(__AMX_INT8__)
#include <immintrin.h>
#endif

enum { MOST = 64 };

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

// `products` of each instruction; twelve sums hide its latency
#define VECTOR(name, instruction, products)                                                                            \
    static void * name(void * result) {                                                                                \
        __m512i       s[12];                                                                                           \
        const __m512i a = _mm512_setzero_si512(), b = _mm512_setzero_si512();                                          \
        const long    n = 20000000;                                                                                    \
        _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) {                                                        \
            s[i] = _mm512_setzero_si512();                                                                             \
        }                                                                                                              \
        const double begin = now();                                                                                    \
        for (long k = 0; k < n; k++) {                                                                                 \
            __asm__ volatile(                                                                                          \
                instruction " %13, %12, %0\n " instruction " %13, %12, %1\n " instruction " %13, %12, %2\n"            \
                instruction " %13, %12, %3\n " instruction " %13, %12, %4\n " instruction " %13, %12, %5\n"            \
                instruction " %13, %12, %6\n " instruction " %13, %12, %7\n " instruction " %13, %12, %8\n"            \
                instruction " %13, %12, %9\n " instruction " %13, %12, %10\n " instruction " %13, %12, %11\n"          \
                : "+v"(s[0]), "+v"(s[1]), "+v"(s[2]), "+v"(s[3]), "+v"(s[4]), "+v"(s[5]), "+v"(s[6]), "+v"(s[7]),      \
                  "+v"(s[8]), "+v"(s[9]), "+v"(s[10]), "+v"(s[11])                                                     \
                : "v"(a), "v"(b));                                                                                     \
        }                                                                                                              \
        *(double *) result = 12.0 * (products) * n / (now() - begin);                                                  \
        return NULL;                                                                                                   \
    }

#if defined(__AVX512VNNI__)
VECTOR(vnni, "vpdpbusd", 64)
#endif
#if defined(__AVX512BF16__)
VECTOR(bf16, "vdpbf16ps", 32)
#endif
#if defined(__AVX512F__)
VECTOR(fused, "vfmadd231ps", 16)
#endif

#if defined(__AMX_INT8__)
// 16 rows of 64 quants times 16 columns, into four tiles of sums
static void * amx(void * result) {
    struct {
        uint8_t  palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t  rows[16];
    } config __attribute__((aligned(64))) = { .palette = 1 };

    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i]  = 16;
    }
    const long n = 2000000;
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
    __asm__ volatile("tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3\n"
                     "tilezero %%tmm4\n tilezero %%tmm5\n tilezero %%tmm6\n tilezero %%tmm7" : :);
    const double begin = now();
    for (long k = 0; k < n; k++) {
        __asm__ volatile("tdpbssd %%tmm6, %%tmm4, %%tmm0\n tdpbssd %%tmm7, %%tmm4, %%tmm1\n"
                         "tdpbssd %%tmm6, %%tmm5, %%tmm2\n tdpbssd %%tmm7, %%tmm5, %%tmm3" : :);
    }
    *(double *) result = 4.0 * 16 * 16 * 64 * n / (now() - begin);
    __asm__ volatile("tilerelease" : :);
    return NULL;
}
#endif

static double measure(void * (*run)(void *), int threads) {
    double best = 0;
    for (int round = 0; round < 3; round++) {
        pthread_t others[MOST];
        double    rates[MOST], sum = 0;
        for (int i = 0; i < threads; i++) {
            if (pthread_create(&others[i], NULL, run, &rates[i]) != 0) {
                exit(1);
            }
        }
        for (int i = 0; i < threads; i++) {
            pthread_join(others[i], NULL);
            sum += rates[i];
        }
        best = sum > best ? sum : best;
    }
    return best;
}

int main(int argc, char ** argv) {
    const int threads = argc > 1 ? atoi(argv[1]) : 1;
    if (threads < 1 || threads > MOST) {
        fprintf(stderr, "threads is %d; give 1 to %d\n", threads, MOST);
        return 2;
    }
    const char * separator = "";
    printf("{");
#if defined(__AVX512VNNI__)
    printf("%s\"vpdpbusd\": %.4g", separator, measure(vnni, threads));
    separator = ", ";
#endif
#if defined(__AVX512BF16__)
    printf("%s\"vdpbf16ps\": %.4g", separator, measure(bf16, threads));
    separator = ", ";
#endif
#if defined(__AVX512F__)
    printf("%s\"vfmadd231ps\": %.4g", separator, measure(fused, threads));
    separator = ", ";
#endif
#if defined(__AMX_INT8__)
    if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) { // ARCH_REQ_XCOMP_PERM, tile data
        printf("%s\"tdpbssd\": %.4g", separator, measure(amx, threads));
    }
#endif
    (void) measure;
    (void) separator;
    printf("}\n");
    return 0;
}
