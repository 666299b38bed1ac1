package cuda

// AnyGEMM has all projections of BatchInvariant done by gemm_any.cu.
func (o Options) AnyGEMM() Options {
	o.anyGEMM = true
	return o
}

// Part has steps run on some of the multiprocessors: the first n, or with -n those behind them.
func (o Options) Part(n int) Options {
	o.part = n
	return o
}
