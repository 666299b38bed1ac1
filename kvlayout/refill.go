package kvlayout

import "fmt"

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

// CheckRefills reports what is wrong with refills out of sources: ours are blocks
// of a pool of so many with so many tokens each, the destinations of another.
func CheckRefills(refills []Refill, sources []Held, blocks, tokens, theirBlocks, theirTokens int) error {
	for _, s := range sources {
		if s.Block < 0 || int(s.Block) >= blocks || s.Rows < 1 || s.Rows > tokens || s.FirstPos < 0 || s.FirstPos > MaxPosition {
			return fmt.Errorf("source %+v: pool has %d blocks of %d", s, blocks, tokens)
		}
	}
	pos, used := 0, 0 // all before them is done with
	for _, r := range refills {
		if r.Block < 0 || int(r.Block) >= theirBlocks || r.Rows < 1 || r.Rows > theirTokens || r.FirstPos < pos || r.FirstPos > MaxPosition {
			return fmt.Errorf("refill %+v at position %d: the peer has %d blocks of %d", r, pos, theirBlocks, theirTokens)
		}
		pos = r.FirstPos + r.Rows
		if r.Count < 1 || r.Count > r.Rows || r.First < 0 || r.First > len(sources)-r.Count || r.First != used && r.First != used-1 {
			return fmt.Errorf("refill %+v: of %d sources, %d used before", r, len(sources), used)
		}
		used = r.First + r.Count
		at := r.FirstPos
		for i, s := range sources[r.First:used] {
			if at < s.FirstPos || at >= s.FirstPos+s.Rows || i > 0 && at != s.FirstPos {
				return fmt.Errorf("refill %+v: source %+v does not hold position %d", r, s, at)
			}
			at = min(pos, s.FirstPos+s.Rows)
		}
		if at != pos {
			return fmt.Errorf("refill %+v: its sources end at position %d", r, at)
		}
	}
	if used != len(sources) {
		return fmt.Errorf("%d sources, the refills use %d", len(sources), used)
	}
	return nil
}
