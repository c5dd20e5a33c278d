// As common.h here: the names of llama.cpp's log.h, all of which write to stderr.

#pragma once

#include "ggml.h"

#include <cstdio>

#define LOG_LEVEL_ERROR 1
#define LOG_LEVEL_DEBUG 5
#define LOG(...) fprintf(stderr, __VA_ARGS__)
#define LOG_INF(...) fprintf(stderr, __VA_ARGS__)
#define LOG_ERR(...) fprintf(stderr, __VA_ARGS__)

struct common_log;
inline common_log * common_log_main() { return nullptr; }
inline void common_log_flush(common_log *) {}
inline void common_log_set_verbosity_thold(int) {}
inline int common_log_get_verbosity(ggml_log_level) { return LOG_LEVEL_DEBUG; }
