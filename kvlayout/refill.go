package kvlayout

// Held is a block of ours: its rows 0 .. Rows-1 are the positions of one sequence from
// FirstPos on, and its stored digests cover exactly these.
type Held struct {
	Block          int32
	FirstPos, Rows int
}

// Refill is a destination block whose rows 0 .. Rows-1 become the positions from
// FirstPos on. They come from the held blocks First .. First+Count-1 of a list, which
// follow each other in the sequence; the first and the last may hold other positions
// too.
//
// In a list of refills FirstPos ascends and positions do not overlap. Two neighbours
// may share a source, the last of one and the first of the next; no others do.
type Refill struct {
	Block          int32
	FirstPos, Rows int
	First, Count   int
}

// MaxPosition bounds the positions that refills name.
const MaxPosition = 1<<31 - 1024
