package decode

import (
	"context"
	"errors"
	"time"

	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// collectFence is how long a failed Collect, and its request, waits for its fence. After it the
// blocks are quarantined.
const collectFence = 50 * time.Millisecond

// Prefix is the beginning of a prompt that another worker has cached.
type Prefix struct {
	Addr      string        // its kvconn address
	Peer      kvconn.PeerID // who must answer there
	RequestID string
	Owner     string // unique label of the blocks during the transfer
	Tokens    []int32
	Salt      string
	Chain     *kvcache.Chain // of at least Upto of the Tokens; nil: not made yet
	Upto      int            // tokens, at most
	Least     int            // new tokens; fewer are not worth it
	Most      int            // blocks, at most
	Deadline  time.Time
	// Reach asks the peer how far it has the chain, from token from up to upto, in units of this
	// many tokens. It costs a round trip, so it is called only if the peer lacks some of the first
	// Upto. Nil: the peer holds them for us.
	Reach func(ctx context.Context, chain *kvcache.Chain, unit, from, upto int) (int, error)
}

// Collect brings the missing part of a prefix into the cache and returns how many tokens are new.
// Like a load from any tier it takes only blocks that nobody waits for, and holds none afterwards,
// except those that a silent peer could still write to, which are quarantined. On failure (*Error)
// it keeps the whole blocks that have arrived.
func (s *Service) Collect(ctx context.Context, p *Prefix) (tokens int, err error) {
	session, err := s.open(ctx, p)
	if err != nil {
		return 0, err
	}
	chain := s.chain(p)
	from := s.cache.Reach(&chain, chain.Tokens())
	upto := s.agree(p, &chain, session, from, chain.Tokens())
	if upto-from < p.Least {
		return 0, nil
	}
	tokens, err = s.collect(ctx, p, &chain, session, upto)
	if tokens > 0 || !p.less(err) {
		return tokens, err
	}
	from = s.cache.Reach(&chain, chain.Tokens())
	if upto, err = s.reach(ctx, p, &chain, session, from, upto); err != nil || upto-from < p.Least {
		return 0, err
	}
	return s.collect(ctx, p, &chain, session, upto)
}

func (s *Service) open(ctx context.Context, p *Prefix) (*kvconn.Session, error) {
	if err := s.checkQuarantine(); err != nil {
		return nil, failure(ctx, "borrow blocks", err, ticket.NoSpace)
	}
	session, err := s.recv.Open(ctx, p.Addr, p.Peer)
	if err != nil {
		return nil, failure(ctx, "open session", err, ticket.Dead)
	}
	if !session.Exact() {
		return nil, failure(ctx, "open session", errors.New("its rows are of other numerics"), ticket.Incompatible)
	}
	return session, nil
}

// less reports whether a ticket's error may mean that the peer has less than it was asked for, and
// whether it can be asked how much.
func (p *Prefix) less(err error) bool {
	var e *Error
	return p.Reach != nil && errors.As(err, &e) && e.Outcome == ticket.Refused
}

// reach asks the peer how far to collect, at most up to upto.
func (s *Service) reach(ctx context.Context, p *Prefix, chain *kvcache.Chain, session *kvconn.Session, from, upto int) (int, error) {
	theirs := kvcache.UnitTokens(session.Peer().Layout.BlockTokens)
	n, err := p.Reach(ctx, chain, theirs, from/theirs*theirs, upto)
	if err != nil {
		return 0, failure(ctx, "ask how far it reaches", err, ticket.Dead)
	}
	return s.agree(p, chain, session, from, min(n, upto)), nil
}

// collect is Collect of the chain's first upto tokens.
func (s *Service) collect(ctx context.Context, p *Prefix, chain *kvcache.Chain, session *kvconn.Session, upto int) (tokens int, err error) {
	table, from, err := s.cache.Borrow(chain, upto, p.Most, p.Owner)
	if err != nil {
		return 0, failure(ctx, "borrow blocks", err, ticket.NoSpace)
	}
	if from >= upto { // brought by another request meanwhile
		s.cache.ReleaseAll(p.Owner)
		return 0, nil
	}
	s.cache.SetState(p.Owner, kvcache.StateReceiving)
	had := from / s.cache.BlockTokens()
	in, err := s.requestCached(ctx, p, session, table, had, s.sink(session))
	if err != nil {
		s.cache.ReleaseAll(p.Owner)
		return 0, failure(ctx, "send ticket", err, ticket.Dead)
	}
	whole := len(table)
	if _, err = in.Wait(ctx); err != nil {
		if !s.fenced(in, p, table[had:]) {
			s.cache.Release(table[:had], p.Owner)
			s.quarantine(in, p.Owner, table[had:])
			return 0, failure(ctx, "collect prefix", err, ticket.Dead)
		}
		whole = s.whole(in.Stored(), had, len(table))
	}
	done := p.Tokens[:whole*s.cache.BlockTokens()]
	tokens = s.cache.InsertChain(chain, done, table[:whole], from) - from
	s.cache.ReleaseAll(p.Owner)
	if err != nil {
		return tokens, failure(ctx, "collect prefix", err, ticket.Dead)
	}
	return tokens, nil
}

// fenced makes the blocks of a failed ticket reusable. It returns false if the fence takes too
// long.
func (s *Service) fenced(in *kvconn.Incoming, p *Prefix, fresh []int32) bool {
	s.cache.Revoke(fresh, p.Owner)
	ctx, cancel := context.WithTimeout(context.Background(), collectFence)
	defer cancel()
	return in.Revoke(ctx) == nil
}

// whole is the number of leading blocks of a table with all layers stored; the first had have.
func (s *Service) whole(stored kvconn.UnitSet, had, blocks int) int {
	for had < blocks && stored.Block(had) == len(s.layers) {
		had++
	}
	return had
}

func (s *Service) chain(p *Prefix) kvcache.Chain {
	if p.Chain != nil {
		return p.Chain.Fork(p.Upto)
	}
	chain := s.cache.NewChain(p.Salt)
	chain.Extend(p.Tokens[:min(p.Upto, len(p.Tokens))])
	return chain
}

// agree returns how far to collect, at most up to most: as far as both units allow and blocks
// suffice.
func (s *Service) agree(p *Prefix, chain *kvcache.Chain, session *kvconn.Session, from, most int) (upto int) {
	bt, unit := s.cache.BlockTokens(), s.cache.UnitTokens()
	theirs := kvcache.UnitTokens(session.Peer().Layout.BlockTokens)
	step := unit
	for step%theirs != 0 { // to the least common multiple
		step += unit
	}
	return min(most, chain.Tokens(), from+p.Most/(unit/bt)*unit) / step * step
}

// requestCached sends a ticket for the blocks of the table from had on.
func (s *Service) requestCached(ctx context.Context, p *Prefix, session *kvconn.Session, table []int32, had int, into kvconn.Sink) (*kvconn.Incoming, error) {
	order, err := (&handoff.Order{Cached: true, Salt: p.Salt, Logprobs: -1, PromptLogprobs: -1}).Encode()
	if err != nil {
		return nil, err
	}
	spec := kvconn.TicketSpec{Link: ticket.NewLink(), RequestID: p.RequestID, Tokens: p.Tokens[:len(table)*s.cache.BlockTokens()],
		First: order, Deadline: p.Deadline, Sink: into}
	spec.Dest, spec.Have = s.dests(table, had)
	return session.Request(ctx, spec)
}

func (s *Service) sink(session *kvconn.Session) *sink {
	return &sink{backend: s.backend, layers: s.layers, trust: session.Unchecked()}
}
