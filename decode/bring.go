package decode

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// held is how long a step may wait for a prefix, and the device with it. A step begins only if the
// rest should arrive sooner, at the pace so far. After twice that time the prefix is given up.
const held = 100 * time.Millisecond

var errHeld = fmt.Errorf("a step has waited for %v", 2*held)

// Bringing is an open session for a prefix that arrives while steps already compute with it.
type Bringing struct {
	s       *Service
	gated   kernels.Gated
	session *kvconn.Session
}

// Prepare opens a session for Bring; nil if steps of this backend cannot wait for peers.
func (s *Service) Prepare(ctx context.Context, p *Prefix) (*Bringing, error) {
	gated, ok := s.backend.(kernels.Gated)
	if !ok {
		return nil, nil
	}
	session, err := s.open(ctx, p)
	if err != nil {
		return nil, err
	}
	return &Bringing{s, gated, session}, nil
}

// Coming is a prefix that arrives in a request's blocks while steps are launched: each layer is
// computed once it has arrived and is verified. It holds the blocks until its end, at most twice
// held after a step can begin.
type Coming struct {
	*Bringing
	p     *Prefix
	chain kvcache.Chain
	table []int32
	from  int // tokens that were already there
	gate  kernels.Gate
	wake  func()

	begun atomic.Bool
	began chan struct{} // closed when begun is set
	over  chan struct{} // closed when good and lost are known
	good  int
	lost  bool

	mu     sync.Mutex // guards its progress
	asked  time.Time  // when the ticket was sent
	here   []bool     // by layer, and by block from the first missing one
	left   []int      // by layer: missing blocks
	layers int        // leading complete layers
}

// Bring is Collect into blocks that the caller holds: table is the prompt's, and its first from
// tokens are there. It returns at once; nil if there is too little to bring. wake is called when a
// step can begin, and at the end; ended gets what Collect returns.
func (b *Bringing) Bring(p *Prefix, table []int32, from int, wake func(), ended func(tokens int, err error)) *Coming {
	s := b.s
	c := &Coming{Bringing: b, p: p, chain: s.chain(p), from: from, wake: wake, began: make(chan struct{}), over: make(chan struct{})}
	upto := s.agree(p, &c.chain, b.session, from, c.chain.Tokens())
	if upto-from < p.Least || upto == from {
		return nil
	}
	bt, layers := s.cache.BlockTokens(), len(s.layers)
	c.table = append(c.table, table[:upto/bt]...)
	fresh := len(c.table) - from/bt
	c.here, c.left = make([]bool, layers*fresh), make([]int, layers)
	for i := range c.left {
		c.left[i] = fresh
	}
	var err error
	if c.gate, err = b.gated.Gate(); err != nil {
		s.log.Error("a step cannot wait for a peer", "error", err)
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		c.gate.Open(layers)
		return nil
	}
	s.cache.Retain(c.table[from/bt:], p.Owner)
	s.cache.SetState(p.Owner, kvcache.StateReceiving)
	s.wg.Go(func() {
		ctx, cancel := context.WithDeadline(s.ctx, p.Deadline)
		defer cancel()
		tokens, err := c.collect(ctx)
		s.cache.ReleaseAll(p.Owner)
		c.gate.Open(layers)
		close(c.over)
		wake()
		ended(tokens, err)
	})
	return c
}

func (c *Coming) collect(ctx context.Context) (tokens int, err error) {
	c.good = c.from
	upto := len(c.table) * c.s.cache.BlockTokens()
	tokens, err = c.attempt(ctx, upto)
	if c.begun.Load() || !c.p.less(err) {
		return tokens, err
	}
	if upto, err = c.s.reach(ctx, c.p, &c.chain, c.session, c.from, upto); err != nil || upto-c.from < c.p.Least {
		return 0, err
	}
	return c.attempt(ctx, upto)
}

// attempt brings the first upto tokens.
func (c *Coming) attempt(ctx context.Context, upto int) (tokens int, err error) {
	s, bt := c.s, c.s.cache.BlockTokens()
	table, had := c.table[:upto/bt], c.from/bt
	c.mu.Lock()
	c.asked = time.Now()
	c.mu.Unlock()
	in, err := s.requestCached(ctx, c.p, c.session, table, had, &counting{s.sink(c.session), c})
	if err != nil {
		return 0, failure(ctx, "send ticket", err, ticket.Dead)
	}
	err = c.await(ctx, in)
	if err != nil && !s.fenced(in, c.p, table[had:]) {
		c.lost = true
		s.quarantine(in, c.p.Owner, table[had:])
		return 0, failure(ctx, "collect prefix", err, ticket.Dead)
	}
	// A block that was requested again may have been rewritten while a step read it: its rows are
	// right now, but the step may have seen others.
	sure := s.whole(in.Stored(), had, len(table))
	whole := sure
	if err == nil {
		whole = len(table)
	}
	c.good = sure * bt / s.cache.UnitTokens() * s.cache.UnitTokens()
	tokens = s.cache.InsertChain(&c.chain, c.p.Tokens[:whole*bt], table[:whole], c.from) - c.from
	if err != nil {
		err = failure(ctx, "collect prefix", err, ticket.Dead)
	}
	return tokens, err
}

// await waits for the ticket's end, but no longer than a step may.
func (c *Coming) await(ctx context.Context, in *kvconn.Incoming) error {
	select {
	case <-c.began:
		late, cancel := context.WithTimeoutCause(ctx, 2*held, errHeld)
		defer cancel()
		ctx = late
	case <-in.Done():
	case <-ctx.Done():
	}
	select {
	case <-in.Done():
		_, err := in.Wait(ctx)
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *Coming) markVerified(layer int, blocks []kvconn.PushedBlock, good []bool) {
	bt := c.s.cache.BlockTokens()
	first := layer * (len(c.table) - c.from/bt)
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, b := range blocks {
		if at := first + (b.FirstPos-c.from)/bt; good[i] && !c.here[at] {
			c.here[at] = true
			c.left[layer]--
		}
	}
	before := c.layers
	for c.layers < len(c.left) && c.left[c.layers] == 0 {
		c.layers++
	}
	if c.layers == before {
		return
	}
	c.gate.Open(c.layers)
	rest := time.Since(c.asked) / time.Duration(c.layers) * time.Duration(len(c.left)-c.layers)
	if rest <= held && !c.begun.Swap(true) {
		close(c.began)
		c.wake()
	}
}

// Move implements engine.Arriving.
func (c *Coming) Move() kernels.Arrival { return c.gate }

// Upto implements engine.Arriving.
func (c *Coming) Upto() int { return len(c.table) * c.s.cache.BlockTokens() }

// Begun implements engine.Arriving.
func (c *Coming) Begun() bool { return c.begun.Load() }

// Over implements engine.Arriving.
func (c *Coming) Over() bool {
	select {
	case <-c.over:
		return true
	default:
		return false
	}
}

// Good implements engine.Arriving. It waits for the end, which is near once a step has begun.
func (c *Coming) Good() (tokens int, lost bool) {
	<-c.over
	return c.good, c.lost
}

// counting is a sink that tells a Coming which blocks are verified.
type counting struct {
	*sink
	c *Coming
}

// Store implements kvconn.Sink.
func (s *counting) Store(layer int, dst int32, row, rows, firstPos int, packed []byte, digests []uint64) error {
	err := s.sink.Store(layer, dst, row, rows, firstPos, packed, digests)
	s.c.markVerified(layer, []kvconn.PushedBlock{{FirstPos: firstPos}}, []bool{err == nil})
	return err
}

// Verify implements kvconn.ViewSink.
func (s *counting) Verify(layer int, dst int32, row, rows, firstPos int, digests []uint64) error {
	err := s.sink.Verify(layer, dst, row, rows, firstPos, digests)
	s.c.markVerified(layer, []kvconn.PushedBlock{{FirstPos: firstPos}}, []bool{err == nil})
	return err
}

// VerifyPushed implements kvconn.DeviceSink.
func (s *counting) VerifyPushed(ctx context.Context, layer int, blocks []kvconn.PushedBlock) ([]bool, error) {
	good, err := s.sink.VerifyPushed(ctx, layer, blocks)
	if err == nil {
		s.c.markVerified(layer, blocks, good)
	}
	return good, err
}

var (
	_ kvconn.ViewSink   = (*counting)(nil)
	_ kvconn.DeviceSink = (*counting)(nil)
)
