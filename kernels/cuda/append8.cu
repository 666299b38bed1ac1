// Append to FP8 pools: append.cuh.
// Oracle: kvconn/convert over a bf16 pool's rows, to the bit.
#include "append.cuh"

int32_t xk_append8(const Launch &l, const Rope &r, const Rows &p) { return append_to(l, r, Fp8Store{p}); }
