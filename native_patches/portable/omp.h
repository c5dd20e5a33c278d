// What ggml and the sampler use of OpenMP's header; team.c has the rest.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

int omp_get_thread_num(void);
int omp_get_num_threads(void);

#ifdef __cplusplus
}
#endif
