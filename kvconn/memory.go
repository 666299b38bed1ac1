package kvconn

// Sink is where a receiver's rows go: the decode side's block pool.
//
// Store gets one block of one layer: positions firstPos .. firstPos+rows-1 of
// the sequence, which are rows row .. row+rows-1 of destination block dst,
// packed (kvlayout.Rows), with one digest a head. It checks the digests first and returns ErrDigest, storing nothing, when
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
// packed (kvlayout.Rows), and one digest a head into digests. index is the destination block index (firstPos / the
// receiver's block size); an implementation whose blocks have another size
// joins or cuts them here. dst need not be aligned. Calls may be concurrent.
// An error fails the ticket: with its outcome when it is an *Error, else as
// Corrupt.
type Source interface {
	Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error
}

// ViewSource is a Source whose rows can be sent from where they lie.
//
// View returns what Load would write, in place, and fills digests as Load
// does, when the rows are one packed run in memory: full blocks of the
// receiver's size. Anything else, errors included, is ok == false and then
// asked of Load. run must keep its bytes until the ticket's fence is quiet;
// the connector only reads it. Calls may be concurrent.
type ViewSource interface {
	Source
	View(layer, index, firstPos, rows int, digests []uint64) (run []byte, ok bool)
}

// ViewSink is a Sink into whose blocks rows can be written directly.
//
// View returns the memory of rows row .. row+rows-1 of block dst in one layer
// when they are one packed run there; ok == false means Store is to be used.
// The connector writes run only for a unit that it has claimed, and only
// inside the ticket's fence. What lies there is not to be believed before
// Verify: it makes the digests anew from the block's bytes, records them as
// the block's and returns nil, or ErrDigest, recording nothing, when they are
// not equal to digests; any other error ends the ticket. A block that was
// written and not verified is simply still missing. The rules of Store hold
// for both: short, concurrent for different blocks or layers, never again for
// a block of a layer once Verify or Store has returned nil for it; except that
// a peer that shares the memory may have written a block that was asked for
// again a second time, which Verify then has to find as good as the first.
type ViewSink interface {
	Sink
	View(layer int, dst int32, row, rows int) (run []byte, ok bool)
	Verify(layer int, dst int32, row, rows, firstPos int, digests []uint64) error
}

// suits tells whether a sink can verify what the session's peer writes.
func (s *Session) suits(sink Sink) (ok bool) {
	_, device := s.device()
	if _, staged := s.staged(); device || staged {
		_, ok = sink.(DeviceSink)
	} else {
		_, ok = sink.(ViewSink)
	}
	return ok
}
