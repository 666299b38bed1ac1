package kvconn

// Sink is where a receiver's rows go: the decode side's block pool.
//
// Store gets one block of one layer: positions firstPos .. firstPos+rows-1 of
// the sequence, which become rows row .. row+rows-1 of destination block dst,
// packed (kvlayout.Rows), with one digest a head. It checks the digests first;
// if they do not match, it returns ErrDigest and stores nothing. Any other
// error ends the ticket. Store must be short: a revoke waits for it. packed and
// digests belong to the caller, who reuses them; packed need not be aligned.
// Calls for different blocks or layers may be concurrent. The same block of the
// same layer is stored by one call at a time, and never again after one has
// returned nil.
type Sink interface {
	Store(layer int, dst int32, row, rows, firstPos int, packed []byte, digests []uint64) error
}

// Source is where a sender's rows come from: one ticket's sequence in the
// prefill side's block pool.
//
// Load writes positions firstPos .. firstPos+rows-1 of one layer into dst,
// packed (kvlayout.Rows), and one digest a head into digests. index is the
// destination block index (firstPos / the receiver's block size); an
// implementation with another block size joins or cuts its blocks here. dst
// need not be aligned. Calls may be concurrent. An error fails the ticket: with
// its outcome when it is an *Error, else as Corrupt.
type Source interface {
	Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error
}

// ViewSource is a Source whose rows can be sent from where they lie.
//
// View returns what Load would write, in place, and fills digests as Load does,
// when the rows are one packed run in memory: full blocks of the receiver's
// size. In any other case, errors included, ok is false and Load is called. run
// must keep its bytes until the ticket's fence is quiet; the connector only
// reads it. Calls may be concurrent.
type ViewSource interface {
	Source
	View(layer, index, firstPos, rows int, digests []uint64) (run []byte, ok bool)
}

// ViewSink is a Sink into whose blocks rows can be written directly.
//
// View returns the memory of rows row .. row+rows-1 of block dst in one layer
// when they are one packed run there; when ok is false, Store is used. The
// connector writes run only for a unit that it has claimed, and only inside the
// ticket's fence.
//
// The rows count only after Verify. It recomputes the digests from the block's
// bytes; if they equal digests, it records them as the block's and returns nil,
// else it records nothing and returns ErrDigest. Any other error ends the
// ticket. A block that was written but not verified is still missing.
//
// The rules of Store hold for both methods: short, concurrent for different
// blocks or layers, never again for a block of a layer once Verify or Store has
// returned nil for it. The exception: a peer that shares the memory may have
// written a block twice that was asked for again, and Verify then checks the
// second write too.
type ViewSink interface {
	Sink
	View(layer int, dst int32, row, rows int) (run []byte, ok bool)
	Verify(layer int, dst int32, row, rows, firstPos int, digests []uint64) error
}

// suits reports whether a sink can verify what the session's peer writes.
func (s *Session) suits(sink Sink) (ok bool) {
	switch s.lent.hold.(type) {
	case DeviceHold, StagedHold:
		_, ok = sink.(DeviceSink)
	default:
		_, ok = sink.(ViewSink)
	}
	return ok
}
