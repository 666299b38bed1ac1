package kvconn

import (
	"context"
	"errors"
	"sync"
)

// Joint is one prompt that comes from several senders: a ticket each, for
// disjoint head ranges (TicketSpec.Heads) of the same destination blocks. Rows
// and digests are kept by head, so the tickets need nothing of each other; only
// the blocks are not to be used, or used again, before all of them are over.
type Joint []*Incoming

// Wait returns the commits, in order, when every ticket is complete, and the
// first failure as soon as it is known. The other tickets then go on: Revoke.
func (j Joint) Wait(ctx context.Context) ([]Commit, error) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	commits := make([]Commit, len(j))
	errs := make(chan error, len(j))
	for n, i := range j {
		wg.Go(func() {
			var err error
			commits[n], err = i.Wait(ctx)
			errs <- err
		})
	}
	for range j {
		if err := <-errs; err != nil {
			return nil, err
		}
	}
	return commits, nil
}

// Revoke is Incoming.Revoke of all: after nil the blocks may be used again.
func (j Joint) Revoke(ctx context.Context) error {
	var errs []error
	for _, i := range j {
		errs = append(errs, i.Revoke(ctx)) // also when ctx has ended: it shuts the fence first
	}
	return errors.Join(errs...)
}
