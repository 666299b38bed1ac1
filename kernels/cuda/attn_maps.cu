// What the copy engine of a multiprocessor is to know of tensors: of the pool and of
// qkv, for attn_hopper.cu. Boxes end up in shared memory as wgmma wants them.
#include "common.cuh"

int32_t xk_tensor_map(CUtensorMap *map, const void *base, uint32_t rank, const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box) {
  decltype(&cuTensorMapEncodeTiled) encode;
  XK_OK_OR_RETURN(xk_driver("cuTensorMapEncodeTiled", &encode));
  cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  CUresult r = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, rank, const_cast<void *>(base), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? XK_OK : xk_fail(XK_CUDA, "cuTensorMapEncodeTiled: %d", int(r));
}

// The pool: a box is a run, as [rows / 8][64-column half][row % 8][64] or, where
// head_dim is no multiple of 64, one half of it; past head_dim there are zeros.
int32_t xk_kv_map(CUtensorMap *map, const element *pool, int64_t rows, int head_dim) {
  cuuint64_t row = cuuint64_t(head_dim) * 2;
  if (head_dim % 64) {
    cuuint64_t dims[2] = {cuuint64_t(head_dim), cuuint64_t(rows)};
    cuuint32_t box[2] = {64, XK_RUN};
    return xk_tensor_map(map, pool, 2, dims, &row, box);
  }
  cuuint64_t dims[4] = {64, 8, cuuint64_t(head_dim) / 64, cuuint64_t(rows) / 8}, strides[3] = {row, 128, 8 * row};
  cuuint32_t box[4] = {64, 8, cuuint32_t(head_dim) / 64, XK_RUN / 8};
  return xk_tensor_map(map, pool, 4, dims, strides, box);
}
// qkv as [rows][width]: a box is 64 columns of 128 rows.
int32_t xk_q_map(CUtensorMap *map, const element *qkv, int64_t rows, int width) {
  cuuint64_t dims[2] = {cuuint64_t(width), cuuint64_t(rows)}, strides[1] = {cuuint64_t(width) * 2};
  cuuint32_t box[2] = {64, XK_TILE};
  return xk_tensor_map(map, qkv, 2, dims, strides, box);
}
// qkv as [rows][heads][head_dim]: a box is 64 columns of the query heads of one
// KV head, of as many rows as a tile takes.
int32_t xk_heads_map(CUtensorMap *map, const element *qkv, int64_t rows, int heads, int kv_heads, int head_dim) {
  cuuint64_t all = heads + 2 * kv_heads, size = cuuint64_t(head_dim) * 2;
  cuuint64_t dims[3] = {cuuint64_t(head_dim), all, cuuint64_t(rows)}, strides[2] = {size, size * all};
  cuuint32_t group = heads / kv_heads, box[3] = {64, group, XK_TILE / group};
  return xk_tensor_map(map, qkv, 3, dims, strides, box);
}
