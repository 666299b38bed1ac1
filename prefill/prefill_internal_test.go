package prefill

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// TestOutcomeOf: what each error is for the peer and the router, however it is wrapped.
func TestOutcomeOf(t *testing.T) {
	for _, c := range []struct {
		err  error
		want ticket.Outcome
	}{
		{&endError{ticket.Corrupt, "x"}, ticket.Corrupt},
		{&engine.OutputError{}, ticket.Invalid},
		{engine.ErrLate, ticket.Shed},
		{&engine.RequestError{}, ticket.Refused},
		{ErrLeaseExists, ticket.Refused},
		{ErrNotCached, ticket.Refused},
		{&engine.TooLongError{}, ticket.NoSpace},
		{engine.ErrQueueFull, ticket.NoSpace},
		{engine.ErrClosed, ticket.NoSpace},
		{ErrTooManyLeases, ticket.NoSpace},
		{ErrGivesEnough, ticket.NoSpace},
		{context.DeadlineExceeded, ticket.Late},
		{context.Canceled, ticket.Cancelled},
		{engine.ErrCancelled, ticket.Cancelled},
		{ErrClaimGone, ticket.Cancelled},
		{errors.New("x"), ticket.Dead},
	} {
		if got := outcomeOf(fmt.Errorf("wrapped: %w", c.err)); got != c.want {
			t.Errorf("%v: %s, want %s", c.err, got, c.want)
		}
	}
}

// TestMerge: a link's report counts the tokens of all its tickets, the longest times, and the first
// failure.
func TestMerge(t *testing.T) {
	var r Report
	for _, one := range []Report{
		{ticket.Done, "", 3, 1, 5, 70}, {ticket.Done, "", 4, 2, 50, 7}, {ticket.Corrupt, "first", 0, 0, 1, 1}, {ticket.Dead, "second", 1, 1, 1, 1}, {ticket.Done, "", 1, 0, 0, 0},
	} {
		r.merge(one)
	}
	if want := (Report{ticket.Corrupt, "first", 9, 4, 50, 70}); r != want {
		t.Errorf("have %+v, want %+v", r, want)
	}
}
