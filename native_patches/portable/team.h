// Teams of threads: the part of an OpenMP runtime that ggml and the sampler need. calls.c has the compilers' names.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

typedef void (*llamabatch_team_work)(void * data);

// Calls work(data) on n_threads threads at once, the caller being one of them, and returns when all have returned.
// n_threads 0: one for each core that the process may use. Inside a team, or where threads cannot be made, fewer.
void llamabatch_team_run(llamabatch_team_work work, void * data, unsigned n_threads);

// Returns when all threads of the caller's team have come here.
void llamabatch_team_barrier(void);

// True for one thread of the team, for each place in the program that all of them pass.
int llamabatch_team_single(void);

int llamabatch_team_thread(void); // 0 to llamabatch_team_size() - 1
int llamabatch_team_size(void);   // 1 outside of a team

#ifdef __cplusplus
}
#endif
