package kvconn

import "testing"

// A receiver that asks for the marks again and again, and reads none, makes one
// wait for each ticket and connection: the last round's.
func TestMarksDoNotPileUp(t *testing.T) {
	m, err := NewMetrics(nil)
	if err != nil {
		t.Fatal(err)
	}
	p := &sender{half: half{side: m.of(SideSender)}}
	for range 2 {
		p.bulk = append(p.bulk, &bulkWriter{p: p, wake: make(chan struct{}, 1)})
	}
	for id := range uint64(3) {
		g := &Outgoing{p: p, t: Ticket{ID: id}, src: stubSource{}, committed: true}
		for round := range uint32(100) {
			if err := g.onResend(&resend{ID: id, Round: round}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, w := range p.bulk {
		marks, _, _ := p.nextWork(w, nil)
		if len(marks) != 3 {
			t.Fatalf("%d marks wait, want one for each of 3 tickets", len(marks))
		}
		for id, m := range marks {
			if s := m.(*sent); s.ID != uint64(id) || s.Round != 99 {
				t.Errorf("mark of ticket %d, round %d", s.ID, s.Round)
			}
		}
	}
}

// stubSource is a source that nobody reads.
type stubSource struct{}

func (stubSource) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	return nil
}
