// Teams of threads for Linux, by futexes. Each thread that starts teams has its own workers, which stay for the next
// team. A thread that waits spins as long as GOMP_SPINCOUNT says, as with GCC's libgomp, and then sleeps.

#define _GNU_SOURCE
#include "team.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("isb" ::: "memory")
#else
#define RELAX() ((void) 0)
#endif

#define LINE 64               // bytes of a cache line
#define SPINS 1000            // where GOMP_SPINCOUNT says nothing
#define SPINS_CROWDED 100     // with more threads than cores: whoever is waited for needs one of them
#define MOST_SPINS 1000000000 // infinite, for practical purposes

// A number that changes, and the threads that sleep until it does.
struct gate {
    _Alignas(LINE) atomic_uint value;
    atomic_uint sleepers;
};

struct pool;

struct worker {
    struct gate start; // of a team that it is part of
    struct pool * pool;
    unsigned seen; // value of `start`
    int thread;    // its number in the team
};

struct pool {
    struct gate arrived; // a barrier is complete
    struct gate done;    // all workers of a team have returned
    _Alignas(LINE) atomic_uint at_barrier;
    _Alignas(LINE) atomic_uint returned;
    _Alignas(LINE) atomic_uint singles;
    _Alignas(LINE) llamabatch_team_work work;
    void * data;
    atomic_uint n_threads; // of the team that runs
    atomic_uint users;     // workers, and the thread that they belong to
    unsigned n_workers;
    struct worker ** workers;
    unsigned n_cores;
    int ends;
    pid_t pid; // a fork has no workers
};

static _Thread_local struct pool * own;  // workers of this thread
static _Thread_local struct pool * team; // that this thread is in
static _Thread_local int number;
static _Thread_local unsigned passed_singles;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;

static void wait_at(struct gate * s, unsigned old, unsigned most) {
    for (unsigned i = 0; i < most; i++) {
        if (atomic_load_explicit(&s->value, memory_order_acquire) != old) {
            return;
        }
        RELAX();
    }
    atomic_fetch_add(&s->sleepers, 1);
    while (atomic_load(&s->value) == old) {
        syscall(SYS_futex, &s->value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    }
    atomic_fetch_sub(&s->sleepers, 1);
}

static void open_gate(struct gate * s) {
    atomic_fetch_add(&s->value, 1);
    if (atomic_load(&s->sleepers)) {
        syscall(SYS_futex, &s->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    }
}

static unsigned cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        return (unsigned) CPU_COUNT(&set);
    }
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (unsigned) online : 1;
}

static unsigned spins = SPINS;

// libgomp reads its environment when it is loaded, and so does this: llamabatch sets the variable for that moment alone.
__attribute__((constructor)) static void read_environment(void) {
    const char * policy = getenv("OMP_WAIT_POLICY");
    if (policy && (*policy == 'a' || *policy == 'A')) {
        spins = MOST_SPINS;
    } else if (policy && (*policy == 'p' || *policy == 'P')) {
        spins = 0;
    }
    const char * text = getenv("GOMP_SPINCOUNT");
    if (!text || !*text) {
        return;
    }
    char * end = NULL;
    const unsigned long n = strtoul(text, &end, 10);
    if (*text == 'i' || *text == 'I' || n > MOST_SPINS) { // "infinite"
        spins = MOST_SPINS;
    } else if (end != text) {
        spins = (unsigned) n;
    }
}

static unsigned spins_of(const struct pool * p) {
    const unsigned n_threads = atomic_load_explicit(&p->n_threads, memory_order_relaxed);
    return n_threads > p->n_cores && spins > SPINS_CROWDED ? SPINS_CROWDED : spins;
}

static void take_part(struct pool * p, int thread) {
    team = p;
    number = thread;
    passed_singles = 0;
    p->work(p->data);
    team = NULL;
    number = 0;
}

static void release(struct pool * p) {
    if (atomic_fetch_sub(&p->users, 1) == 1) {
        for (unsigned i = 0; i < p->n_workers; i++) {
            free(p->workers[i]);
        }
        free(p->workers);
        free(p);
    }
}

static void * worker_main(void * raw) {
    struct worker * w = raw;
    struct pool * p = w->pool;
    for (;;) {
        wait_at(&w->start, w->seen, spins_of(p));
        w->seen = atomic_load(&w->start.value);
        if (p->ends) {
            break;
        }
        const unsigned n_threads = atomic_load(&p->n_threads); // once all have returned, the next team may set another
        take_part(p, w->thread);
        if (atomic_fetch_add(&p->returned, 1) + 2 == n_threads) {
            open_gate(&p->done);
        }
    }
    release(p);
    return NULL;
}

static void end_pool(void * raw) {
    struct pool * p = raw;
    if (p->pid == getpid()) {
        p->ends = 1;
        for (unsigned i = 0; i < p->n_workers; i++) {
            open_gate(&p->workers[i]->start);
        }
        own = NULL;
        release(p);
    }
}

static void make_key(void) { pthread_key_create(&key, end_pool); }

static void * aligned(size_t size) {
    void * made = aligned_alloc(LINE, (size + LINE - 1) / LINE * LINE);
    return made ? memset(made, 0, size) : NULL;
}

static struct pool * own_pool(void) {
    if (own && own->pid == getpid()) {
        return own;
    }
    pthread_once(&once, make_key);
    struct pool * p = aligned(sizeof *p);
    if (p) {
        p->pid = getpid();
        p->n_cores = cores();
        atomic_store(&p->users, 1);
        pthread_setspecific(key, p);
    }
    return own = p;
}

static void add_workers(struct pool * p, unsigned n_threads) {
    struct worker ** more = realloc(p->workers, (n_threads - 1) * sizeof *more);
    if (!more) {
        return;
    }
    p->workers = more;
    // signals are for the threads of the program; a fault is of the thread itself, and blocked no handler would see it
    static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT };
    sigset_t all, before;
    sigfillset(&all);
    for (unsigned i = 0; i < sizeof faults / sizeof *faults; i++) {
        sigdelset(&all, faults[i]);
    }
    pthread_sigmask(SIG_BLOCK, &all, &before);
    while (p->n_workers + 1 < n_threads) {
        struct worker * w = aligned(sizeof *w);
        pthread_t thread;
        if (!w) {
            break;
        }
        w->pool = p;
        w->thread = (int) p->n_workers + 1;
        atomic_fetch_add(&p->users, 1);
        if (pthread_create(&thread, NULL, worker_main, w)) {
            atomic_fetch_sub(&p->users, 1);
            free(w);
            break;
        }
        pthread_detach(thread);
        p->workers[p->n_workers++] = w;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void run_alone(llamabatch_team_work work, void * data) {
    struct pool * outer = team;
    const int outer_number = number;
    const unsigned outer_singles = passed_singles;
    team = NULL;
    number = 0;
    work(data);
    team = outer;
    number = outer_number;
    passed_singles = outer_singles;
}

void llamabatch_team_run(llamabatch_team_work work, void * data, unsigned n_threads) {
    struct pool * p = team || n_threads == 1 ? NULL : own_pool();
    if (p && n_threads == 0) {
        n_threads = p->n_cores;
    }
    if (p && n_threads > p->n_workers + 1) {
        add_workers(p, n_threads);
        n_threads = n_threads < p->n_workers + 1 ? n_threads : p->n_workers + 1;
    }
    if (!p || n_threads <= 1) {
        run_alone(work, data);
        return;
    }
    p->work = work;
    p->data = data;
    atomic_store(&p->n_threads, n_threads);
    atomic_store(&p->at_barrier, 0);
    atomic_store(&p->returned, 0);
    atomic_store(&p->singles, 0);
    const unsigned before = atomic_load(&p->done.value);
    for (unsigned i = 0; i + 1 < n_threads; i++) {
        open_gate(&p->workers[i]->start);
    }
    take_part(p, 0);
    wait_at(&p->done, before, spins_of(p));
}

void llamabatch_team_barrier(void) {
    struct pool * p = team;
    if (!p) {
        return;
    }
    const unsigned old = atomic_load(&p->arrived.value);
    if (atomic_fetch_add(&p->at_barrier, 1) + 1 == atomic_load_explicit(&p->n_threads, memory_order_relaxed)) {
        atomic_store(&p->at_barrier, 0);
        open_gate(&p->arrived);
    } else {
        wait_at(&p->arrived, old, spins_of(p));
    }
}

int llamabatch_team_single(void) {
    struct pool * p = team;
    if (!p) {
        return 1;
    }
    unsigned mine = passed_singles++;
    return atomic_compare_exchange_strong(&p->singles, &mine, mine + 1);
}

int llamabatch_team_thread(void) { return number; }
int llamabatch_team_size(void) { return team ? (int) atomic_load_explicit(&team->n_threads, memory_order_relaxed) : 1; }
