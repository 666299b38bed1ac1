// What ends a probe at the first call that fails.
#pragma once

#include <cstdio>
#include <cstdlib>

#include <cuda_runtime.h>

#include "../xk.h"

#define MUST(call)                                                                                                                                \
  do {                                                                                                                                            \
    int s_ = int(call);                                                                                                                           \
    if (s_ != 0) {                                                                                                                                \
      fprintf(stderr, "%s:%d: %s: %d %s %s\n", __FILE__, __LINE__, #call, s_, xk_last_error(), cudaGetErrorString(cudaGetLastError()));           \
      exit(1);                                                                                                                                    \
    }                                                                                                                                             \
  } while (0)
