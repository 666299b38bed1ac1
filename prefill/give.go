package prefill

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Errors of Config.Give.
var (
	ErrNotCached   = errors.New("not cached here")      // or not for this peer
	ErrGivesEnough = errors.New("gives enough already") // the worker gives as much as it may
)

// Asked is a prefix that another worker wants from our cache.
type Asked struct {
	Peer    kvconn.PeerID
	Private bool // nobody can listen; see kvconn.Outgoing.Private
	Tokens  []int32
	Salt    string
	Blocks  int   // missing at the receiver, of its size
	Bytes   int64 // of those, in all layers
}

// serveCached answers a ticket for cached blocks: it pushes all of them or none. It holds them
// meanwhile, for at most GiveTime.
func (s *Service) serveCached(ctx context.Context, o *kvconn.Outgoing, salt string) {
	t := o.Ticket()
	if s.cfg.Give == nil {
		s.refuse(o, ErrNotCached)
		return
	}
	ask := Asked{Peer: o.Peer().PeerID, Private: o.Private(), Tokens: t.Tokens, Salt: salt}
	for i := range t.Dest {
		if !o.Has(0, i) {
			ask.Blocks++
		}
	}
	ask.Bytes = int64(ask.Blocks) * int64(s.layout.BlockBytes()/s.layout.BlockTokens*t.DestBlockTokens)
	blocks, release, err := s.cfg.Give(ctx, ask)
	if err != nil {
		s.refuse(o, err)
		return
	}
	defer release()
	src := newSource(s.pool, s.layers, len(t.Tokens), t.DestBlockTokens)
	src.fill(blocks)
	if s.accept(o, src) != nil {
		<-o.Done()
		return
	}
	o.PushAll()
	o.Commit(nil)
	timer := time.NewTimer(s.cfg.GiveTime)
	defer timer.Stop()
	select {
	case <-o.Done():
	case <-timer.C:
		o.Fail(ticket.Late, fmt.Sprintf("not taken within %v", s.cfg.GiveTime))
		<-o.Done()
	}
}

// refuse fails a ticket without a log line: the peer computes instead.
func (s *Service) refuse(o *kvconn.Outgoing, err error) {
	o.Fail(outcomeOf(err), err.Error())
	<-o.Done()
}
