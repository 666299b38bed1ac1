package kvevents

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/zmtp"
)

// TestReplayKeepsNothing: what is dropped while a slow reader is told of the past
// is not kept for it, and what comes meanwhile is not for the replay.
func TestReplayKeepsNothing(t *testing.T) {
	p, err := Publish(PublisherConfig{Listen: "127.0.0.1:0", Replay: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	send := func() { p.Send(&Batch{Events: []Event{{Kind: Cleared}}}) }
	replayed := func(from uint64, during func(seq uint64)) (got []uint64) {
		t.Helper()
		err := p.replay(zmtp.Peer{}, [][]byte{nil, binary.BigEndian.AppendUint64(nil, from)}, func(f ...[]byte) error {
			seq := binary.BigEndian.Uint64(f[2])
			if seq != endSeq {
				during(seq)
			}
			got = append(got, seq)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	want := func(got []uint64, want ...uint64) {
		t.Helper()
		if !slices.Equal(got, append(want, endSeq)) {
			t.Errorf("replayed %d, want %d and the end", got, want)
		}
	}
	for range 4 {
		send()
	}
	idle := func(uint64) {}
	want(replayed(0, idle), 0, 1, 2, 3)
	want(replayed(2, idle), 2, 3)
	want(replayed(4, idle))
	want(replayed(endSeq, idle))
	want(replayed(1, func(seq uint64) {
		if seq == 2 {
			p.Lose()
			send()
		}
	}), 1, 2)
	want(replayed(0, idle), 5)
}
