// NCCL, which is opened at run time: what link.cu and ranks_nccl.cu call of it.
#pragma once

#include <climits>

#include "common.cuh"

// NCCL's ABI as of 2.18, which later ones read by its size and version.
struct NcclId {
  char b[XK_LINK_ID_BYTES];
};
struct NcclOptions {
  size_t size;
  unsigned magic, version;
  int blocking, cga, min_ctas, max_ctas;
  const char *net;
  int split, traffic;
  NcclOptions(bool waits, int ctas) // waits: calls return when they have done what is asked
      : size(sizeof(NcclOptions)), magic(0xcafebeef), version(21800), blocking(waits), cga(INT_MIN), min_ctas(INT_MIN), max_ctas(ctas), net(nullptr), split(INT_MIN), traffic(INT_MIN) {}
};
constexpr int NCCL_IN_PROGRESS = 7, NCCL_BYTES = 0; // of ncclResult_t and ncclDataType_t

struct Nccl {
  void *handle = nullptr;
  int (*GetUniqueId)(NcclId *);
  int (*CommInitRankConfig)(void **, int, NcclId, int, NcclOptions *);
  int (*CommGetAsyncError)(void *, int *);
  int (*Send)(const void *, size_t, int, int, void *, cudaStream_t);
  int (*Recv)(void *, size_t, int, int, void *, cudaStream_t);
  int (*AllGather)(const void *, void *, size_t, int, void *, cudaStream_t);
  int (*CommAbort)(void *);
  int (*GroupStart)();
  int (*GroupEnd)();
  const char *(*GetErrorString)(int);
};

// The process's library; XK_NO_PEER: there is none.
int32_t xk_nccl(const Nccl **out);
