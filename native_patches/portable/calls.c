// The calls that GCC (GOMP_) and Clang (__kmpc_) make of `#pragma omp parallel`, `barrier` and `single`, by team.h.
// Linked into each library that has such a pragma and hidden there: torch's or numpy's OpenMP never answers them.

#include "omp.h"
#include "team.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#pragma GCC visibility push(hidden)

int omp_get_thread_num(void) { return llamabatch_team_thread(); }
int omp_get_num_threads(void) { return llamabatch_team_size(); }

// GCC

void GOMP_parallel(void (*work)(void *), void * data, unsigned n_threads, unsigned flags);
void GOMP_parallel(void (*work)(void *), void * data, unsigned n_threads, unsigned flags) {
    (void) flags; // the binding of threads to places
    llamabatch_team_run(work, data, n_threads);
}

void GOMP_barrier(void);
void GOMP_barrier(void) { llamabatch_team_barrier(); }

bool GOMP_single_start(void);
bool GOMP_single_start(void) { return llamabatch_team_single() != 0; }

// Clang

#define MOST_SHARED 8 // variables that a parallel region takes from outside

// it takes no more than it shares: further arguments stay unread in the calling conventions of both machines
typedef void (*microtask)(int32_t *, int32_t *, void *, void *, void *, void *, void *, void *, void *, void *);

struct outlined {
    microtask task;
    void * shared[MOST_SHARED];
};

static _Thread_local unsigned wanted; // of the next region: what num_threads() says

static void run_outlined(void * data) {
    const struct outlined * o = data;
    void * const * s = o->shared;
    int32_t thread = llamabatch_team_thread(), bound = 0;
    o->task(&thread, &bound, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]);
}

int32_t __kmpc_global_thread_num(void * place);
int32_t __kmpc_global_thread_num(void * place) {
    (void) place;
    return llamabatch_team_thread();
}

void __kmpc_push_num_threads(void * place, int32_t thread, int32_t n_threads);
void __kmpc_push_num_threads(void * place, int32_t thread, int32_t n_threads) {
    (void) place;
    (void) thread;
    wanted = n_threads > 0 ? (unsigned) n_threads : 1;
}

void __kmpc_fork_call(void * place, int32_t n_shared, microtask task, ...);
void __kmpc_fork_call(void * place, int32_t n_shared, microtask task, ...) {
    (void) place;
    struct outlined o = { task, { 0 } };
    if (n_shared > MOST_SHARED) {
        abort(); // a new region: raise MOST_SHARED
    }
    va_list given;
    va_start(given, task);
    for (int32_t i = 0; i < n_shared; i++) {
        o.shared[i] = va_arg(given, void *);
    }
    va_end(given);
    const unsigned n_threads = wanted;
    wanted = 0;
    llamabatch_team_run(run_outlined, &o, n_threads);
}

void __kmpc_serialized_parallel(void * place, int32_t thread);
void __kmpc_serialized_parallel(void * place, int32_t thread) {
    (void) place;
    (void) thread;
    wanted = 0;
}

void __kmpc_end_serialized_parallel(void * place, int32_t thread);
void __kmpc_end_serialized_parallel(void * place, int32_t thread) {
    (void) place;
    (void) thread;
}

void __kmpc_barrier(void * place, int32_t thread);
void __kmpc_barrier(void * place, int32_t thread) {
    (void) place;
    (void) thread;
    llamabatch_team_barrier();
}

int32_t __kmpc_single(void * place, int32_t thread);
int32_t __kmpc_single(void * place, int32_t thread) {
    (void) place;
    (void) thread;
    return llamabatch_team_single();
}

void __kmpc_end_single(void * place, int32_t thread);
void __kmpc_end_single(void * place, int32_t thread) {
    (void) place;
    (void) thread;
}

#pragma GCC visibility pop
