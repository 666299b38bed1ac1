package kvconn

// Sink is where a receiver's rows go: the decode side's block pool.
//
// Store gets one block of one layer: positions firstPos .. firstPos+rows-1 of
// the sequence, which are rows row .. row+rows-1 of destination block dst,
// packed as [2 (K,V)][kv_heads][rows][row_bytes], with one digest a KV head.
// It checks the digests first and returns ErrDigest, storing nothing, when
// they do not match; any other error ends the ticket. It must be short: a
// revoke waits for it. packed and digests belong to the caller and are reused
// after it returns. Calls for different blocks or layers may be concurrent;
// the same block of the same layer is stored by one call at a time, and never
// again after one has returned nil. packed need not be aligned.
type Sink interface {
	Store(layer int, dst int32, row, rows, firstPos int, packed []byte, digests []uint64) error
}

// Source is where a sender's rows come from: one ticket's sequence in the
// prefill side's block pool.
//
// Load writes positions firstPos .. firstPos+rows-1 of one layer into dst,
// packed as [2 (K,V)][kv_heads][rows][row_bytes], and one digest a KV head
// into digests. index is the destination block index (firstPos / the
// receiver's block size); an implementation whose blocks have another size
// joins or cuts them here. dst need not be aligned. Calls may be concurrent.
// An error fails the ticket: with its outcome when it is an *Error, else as
// Corrupt.
type Source interface {
	Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error
}
