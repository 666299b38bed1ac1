package kvconn

import (
	"sync"
	"testing"
)

// A sender takes ticket ids in rising order only, so requests made at the same
// time must leave in the order of their ids.
func TestConcurrentRequestsKeepOrder(t *testing.T) {
	s, _ := lonely(t, &countSink{})
	<-s.out // lonely's own ticket
	const workers, each, rounds = 8, 256, 80
	s.cfg.MaxTickets = 1 + workers*each*rounds
	s.out = make(chan message, workers*each)
	last := s.lastID
	for range rounds {
		start := make(chan struct{})
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				<-start
				for range each {
					if _, err := s.Request(t.Context(), TicketSpec{Positions: 1, Dest: []Dest{{1, 1}}, Sink: &countSink{}}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		close(start)
		wg.Wait()
		for range workers * each {
			m := (<-s.out).(*request)
			if m.ID != last+1 {
				t.Fatalf("ticket %d left after ticket %d", m.ID, last)
			}
			last = m.ID
		}
	}
}
