package prefill

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

const wait = 10 * time.Second

var done = Report{Outcome: ticket.Done, PromptTokens: 5, CachedTokens: 1, QueueUS: 7, ComputeUS: 9}

// scene is a link table with one exchange on it.
type scene struct {
	*links
	t   *testing.T
	key ticket.Link
}

func newScene(t *testing.T) *scene { return &scene{newLinks(wait, 4), t, ticket.NewLink()} }

// ticket begins one of the exchange's tickets.
func (s *scene) ticket(index, of int) (context.Context, func(Report)) {
	s.t.Helper()
	ctx, cancel := context.WithCancelCause(s.t.Context())
	end, err := s.begin(s.key, index, of, cancel)
	if err != nil {
		s.t.Fatal(err)
	}
	return ctx, end
}

// refused checks that a ticket cannot begin any more.
func (s *scene) refused(index, of int, want ticket.Outcome, msg string) {
	s.t.Helper()
	_, err := s.begin(s.key, index, of, func(error) {})
	var end *endError
	if !errors.As(err, &end) || end.outcome != want || !strings.Contains(end.msg, msg) {
		s.t.Errorf("ticket %d: %v, want %s %q", index, err, want, msg)
	}
}

// leg is the router's; its report comes on the channel.
func (s *scene) leg(ctx context.Context) chan Report {
	c := make(chan Report, 1)
	go func() { c <- s.await(ctx, s.key) }()
	synctest.Wait()
	return c
}

func (s *scene) reports(c chan Report, want ticket.Outcome) Report {
	s.t.Helper()
	synctest.Wait()
	select {
	case r := <-c:
		if r.Outcome != want {
			s.t.Errorf("the leg got %+v, want %s", r, want)
		}
		return r
	default:
		s.t.Fatal("the leg still waits")
	}
	return Report{}
}

// empty checks that nothing is live.
func (s *scene) empty() {
	s.t.Helper()
	if l := s.ledger(); len(l) > 0 {
		s.t.Errorf("ledger: %+v", l)
	}
	if len(s.finished) > s.limit || len(s.finished) != len(s.order) {
		s.t.Errorf("%d links remembered, %d in order, limit %d", len(s.finished), len(s.order), s.limit)
	}
}

func TestLink(t *testing.T) {
	for _, c := range []struct {
		name string
		run  func(s *scene)
	}{
		{"the leg first", func(s *scene) {
			leg := s.leg(s.t.Context())
			_, end := s.ticket(0, 1)
			end(done)
			if r := s.reports(leg, ticket.Done); r != done {
				s.t.Errorf("%+v", r)
			}
		}},
		{"the ticket first", func(s *scene) {
			_, end := s.ticket(0, 1)
			leg := s.leg(s.t.Context())
			time.Sleep(2 * wait) // its own deadline rules
			end(done)
			s.reports(leg, ticket.Done)
		}},
		{"the leg after it all", func(s *scene) {
			_, end := s.ticket(0, 1)
			end(done)
			if r := s.reports(s.leg(s.t.Context()), ticket.Done); r != done {
				s.t.Errorf("%+v", r)
			}
			s.refused(0, 1, ticket.Refused, "is over")
		}},
		{"a timer that fires while a ticket begins", func(s *scene) {
			leg := s.leg(s.t.Context())
			_, end := s.ticket(0, 2)
			s.expire(s.key, s.live[s.key])
			end(done)
			s.expire(s.key, s.live[s.key]) // the next one has its time
			_, end = s.ticket(1, 2)
			end(done)
			s.reports(leg, ticket.Done)
		}},
		{"no ticket comes", func(s *scene) {
			leg := s.leg(s.t.Context())
			began := time.Now()
			r := <-leg
			if r.Outcome != ticket.Late || time.Since(began) != wait {
				s.t.Errorf("%+v after %v", r, time.Since(began))
			}
			s.refused(0, 1, ticket.Late, "no ticket")
		}},
		{"a ticket without a leg", func(s *scene) {
			_, end := s.ticket(0, 1)
			end(done)
		}},
		{"several tickets", func(s *scene) {
			leg := s.leg(s.t.Context())
			_, end0 := s.ticket(0, 3)
			_, end2 := s.ticket(2, 3)
			end2(done)
			end0(Report{Outcome: ticket.Done, PromptTokens: 1, QueueUS: 100})
			time.Sleep(wait - 1)
			_, end1 := s.ticket(1, 3)
			time.Sleep(2 * wait)
			end1(done)
			if r := s.reports(leg, ticket.Done); r.PromptTokens != 11 || r.CachedTokens != 2 || r.QueueUS != 100 || r.ComputeUS != 9 {
				s.t.Errorf("%+v", r)
			}
		}},
		{"the next ticket does not come", func(s *scene) {
			leg := s.leg(s.t.Context())
			_, end := s.ticket(0, 2)
			end(done)
			time.Sleep(wait)
			s.reports(leg, ticket.Late)
			s.refused(1, 2, ticket.Late, "no ticket")
		}},
		{"nor a leg", func(s *scene) {
			_, end := s.ticket(0, 2)
			end(done)
			if l := s.ledger(); len(l) != 1 || l[0].Kind != "linked" {
				s.t.Errorf("ledger %+v", l)
			}
			time.Sleep(wait)
			synctest.Wait()
		}},
		{"the last ticket fails", func(s *scene) {
			leg := s.leg(s.t.Context())
			_, end0 := s.ticket(0, 2)
			end0(done)
			_, end1 := s.ticket(1, 2)
			end1(Report{Outcome: ticket.NoSpace, Message: "full", PromptTokens: 2})
			if r := s.reports(leg, ticket.NoSpace); r.Message != "full" || r.PromptTokens != 7 {
				s.t.Errorf("%+v", r)
			}
			s.refused(0, 2, ticket.NoSpace, "full")
		}},
		{"one ticket fails", func(s *scene) {
			leg := s.leg(s.t.Context())
			sibling, end0 := s.ticket(0, 3)
			_, end1 := s.ticket(1, 3)
			end1(Report{Outcome: ticket.NoSpace, Message: "full"})
			s.reports(leg, ticket.NoSpace)
			if cause := context.Cause(sibling); outcomeOf(cause) != ticket.NoSpace {
				s.t.Errorf("the sibling ended by %v", cause)
			}
			s.refused(2, 3, ticket.NoSpace, "full")
			if r := s.reports(s.leg(s.t.Context()), ticket.NoSpace); r.Message != "full" {
				s.t.Errorf("%+v", r)
			}
			end0(Report{Outcome: ticket.Cancelled})
		}},
		{"the leg leaves", func(s *scene) {
			ctx, leave := context.WithCancel(s.t.Context())
			leg := s.leg(ctx)
			running, end := s.ticket(0, 2)
			leave()
			s.reports(leg, ticket.Cancelled)
			if cause := context.Cause(running); outcomeOf(cause) != ticket.Cancelled {
				s.t.Errorf("the ticket ended by %v", cause)
			}
			s.refused(1, 2, ticket.Cancelled, "gave up")
			end(Report{Outcome: ticket.Cancelled})
		}},
		{"the leg leaves before any ticket", func(s *scene) {
			ctx, leave := context.WithCancel(s.t.Context())
			leg := s.leg(ctx)
			leave()
			s.reports(leg, ticket.Cancelled)
			s.refused(0, 1, ticket.Cancelled, "gave up")
		}},
		{"the leg's deadline", func(s *scene) {
			ctx, cancel := context.WithTimeout(s.t.Context(), time.Second)
			defer cancel()
			leg := s.leg(ctx)
			running, end := s.ticket(0, 1)
			time.Sleep(time.Second)
			s.reports(leg, ticket.Late)
			if cause := context.Cause(running); outcomeOf(cause) != ticket.Late {
				s.t.Errorf("the ticket ended by %v", cause)
			}
			end(Report{Outcome: ticket.Late})
		}},
		{"duplicates", func(s *scene) {
			leg := s.leg(s.t.Context())
			_, end := s.ticket(0, 2)
			s.refused(0, 2, ticket.Refused, "twice")
			s.refused(1, 3, ticket.Refused, "announced")
			s.reports(s.leg(s.t.Context()), ticket.Refused)
			end(done)
			s.refused(0, 2, ticket.Refused, "twice")
			_, end = s.ticket(1, 2)
			end(done)
			s.reports(leg, ticket.Done)
		}},
		{"memory", func(s *scene) {
			first := s.key
			for range 20 {
				s.key = ticket.NewLink()
				_, end := s.ticket(0, 1)
				end(done)
			}
			s.reports(s.leg(s.t.Context()), ticket.Done)
			s.key = first // forgotten: as one that nobody has heard of
			leg := s.leg(s.t.Context())
			time.Sleep(wait)
			s.reports(leg, ticket.Late)
		}},
		{"close", func(s *scene) {
			leg := s.leg(s.t.Context())
			running, end := s.ticket(0, 1)
			s.close()
			s.reports(leg, ticket.Cancelled)
			if running.Err() == nil {
				s.t.Error("the ticket runs on")
			}
			end(Report{Outcome: ticket.Cancelled})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScene(t)
				c.run(s)
				synctest.Wait()
				s.empty()
			})
		})
	}
}

// TestLinksRemembered: of many links that are over the latest are remembered.
func TestLinksRemembered(t *testing.T) {
	l := newLinks(wait, 3)
	var keys []ticket.Link
	for range 5 {
		key := ticket.NewLink()
		end, err := l.begin(key, 0, 1, func(error) {})
		if err != nil {
			t.Fatal(err)
		}
		end(done)
		keys = append(keys, key)
	}
	for i, key := range keys {
		if _, known := l.finished[key]; known != (i >= 2) {
			t.Errorf("number %d of 5 is known: %t", i, known)
		}
	}
	if len(l.order) != 3 || len(l.live) != 0 {
		t.Errorf("%d in order, %d live", len(l.order), len(l.live))
	}
}
