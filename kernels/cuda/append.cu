// Append to bf16 pools: append.cuh.
// Oracle: kernels/cpu for values, kernels.DigestRows for digests, to the bit.
#include "append.cuh"

int32_t xk_append(const Launch &l, const Rope &r, const Pool &p) { return append_to(l, r, Bf16Store{p}); }
