package kvlayout

// Held is a block of ours: its rows 0 .. Rows-1 are the positions of one sequence
// from FirstPos on, and its stored digests cover exactly those.
type Held struct {
	Block          int32
	FirstPos, Rows int
}

// Refill is a destination block that gets the positions from FirstPos on as its
// rows 0 .. Rows-1, out of the held blocks First .. First+Count-1 of a list:
// these follow each other in the sequence, and the first and the last hold some
// of the positions. In a list of refills FirstPos ascends and positions do not
// overlap; a refill's first source may be the last one of the refill before, its
// others are its own.
type Refill struct {
	Block          int32
	FirstPos, Rows int
	First, Count   int
}

// MaxPosition bounds the positions that refills name.
const MaxPosition = 1<<31 - 1024
