package cuda

// AnyGEMM has all projections of BatchInvariant done by gemm_any.cu.
func (o Options) AnyGEMM() Options {
	o.anyGEMM = true
	return o
}
