package flight

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
)

// answer is decode's, once nothing can be repeated any more: a whole body, or a stream whose
// first events are here.
type answer struct {
	status      int
	contentType string
	timing      string // decode's Server-Timing
	body        []byte
	events      *events // nil for a whole body
	first       []byte
	// merge returns the prompt's usage; nil if decode knows it.
	merge     func() (openai.PromptUsage, bool)
	forwarded bool // another API's, relayed as it comes
	length    int  // of a stream's body; -1: not announced
}

// dispatch makes attempts, each with another pair, until one answers or nothing is left to
// try. last is how a stream broke that is taken over; nil for a new request.
func (q *request) dispatch(try func(*attempt) (*answer, *failure), last *failure) (*answer, *openai.Error) {
	var exclude, avoid []string
	prefer := ""
	if last != nil {
		exclude = last.exclude
	}
	var refused *answer // by a worker than which others are larger
	for n := 1; ; n++ {
		choice, version, oerr := q.choose(exclude, avoid, prefer)
		if oerr != nil && refused != nil && q.ctx.Err() == nil {
			q.firstByte()
			return refused, nil
		}
		if oerr != nil {
			if last != nil && q.ctx.Err() == nil {
				oerr.Message += "; " + last.Error()
			}
			return nil, oerr
		}
		again := func(id string) bool { return slices.Contains(avoid, id) || slices.Contains(exclude, id) }
		if n > 1 && (again(choice.Prefill.ID) || again(choice.Decode.ID)) && closedWithin(backoff(n-1), q.ctx.Done(), nil) {
			choice.EndPrefill()
			choice.EndDecode()
			return nil, contextError(&q.ctx)
		}
		a := q.newAttempt(choice, version)
		ans, f := try(a)
		if f == nil {
			return ans, nil
		}
		if !q.resumes {
			f = q.lost(f)
		}
		a = q.attempts[len(q.attempts)-1]
		a.close()
		if q.ctx.Err() != nil {
			return nil, contextError(&q.ctx)
		}
		if q.forwarded && f.api != nil { // the client's body broke
			return nil, f.api
		}
		if refused = f.relay; refused != nil && (!f.retry || n >= q.s.Attempts) { // the client's fault, in the engine's words
			q.firstByte()
			return f.relay, nil
		}
		q.s.facts.forget(a.p.inst)
		tried := []any{"link", a.link.String(), "prefill", a.p.inst.ID, "decode", a.d.inst.ID}
		if q.forwarded {
			tried = []any{"worker", a.d.inst.ID}
		}
		level := slog.LevelWarn
		if f.outcome == ticket.Shed { // as its worker is meant to, and there can be thousands
			level = slog.LevelDebug
		}
		q.s.Log.With(tried...).Log(&q.ctx, level, "attempt failed", "request_id", q.id, "attempt", n, "err", f.Error())
		if !f.retry || q.probe || n >= q.s.Attempts {
			return nil, f.httpError()
		}
		if refused == nil && !q.s.affords(f) {
			oerr := f.httpError()
			oerr.Message += "; the retry budget is used up"
			return nil, oerr
		}
		q.s.metrics.retries.WithLabelValues(f.reason).Inc()
		last = f
		exclude, avoid = append(exclude, f.exclude...), append(avoid, f.avoid...)
		if f.holds != "" && f.holds == prefer { // it lost two partners in a row: perhaps it is to blame
			avoid, f.holds = append(avoid, f.holds), ""
		}
		prefer = f.holds
	}
}

// Back-off. Only an attempt that must use a worker again waits: another one may be free
// now.
const (
	backoffFirst = 10 * time.Millisecond
	backoffMost  = 500 * time.Millisecond
)

// backoff is the wait before retry n. It doubles, and half of it is random, so that
// requests that failed together do not come back together.
func backoff(n int) time.Duration {
	d := min(backoffFirst<<min(n-1, 16), backoffMost)
	return d/2 + rand.N(d/2+1)
}

// returnWait is how often a stream looks whether a worker that it lost is still being started again.
const returnWait = 500 * time.Millisecond

// choose picks a pair, waiting up to PairWait for one.
func (q *request) choose(exclude, avoid []string, prefer string) (*pick.Choice, uint64, *openai.Error) {
	s := q.s
	if q.ctx.Err() != nil {
		return nil, 0, contextError(&q.ctx)
	}
	req := q.pickRequest(exclude, avoid, prefer)
	barred := req.Exclude
	var timer *time.Timer
	if q.resumes && !q.onTrial() {
		return nil, 0, contextError(&q.ctx)
	}
	for {
		changed, probed := s.fleet.Changed(), s.Members.Probed()
		if q.top.Model == "" {
			if err := q.resolveModel(); err != nil {
				return nil, 0, err
			}
			req = q.pickRequest(exclude, avoid, prefer)
		}
		returning := q.returning() // else one that is back between the view and the question would be missed
		view := s.Members.View()
		avoided := q.still(view.Snapshot, avoid)
		if req.Exclude = q.still(view.Snapshot, barred); q.resumes {
			req.Exclude, avoided = q.unfit(view.Snapshot, req.Exclude, avoided)
		}
		req.Avoid = q.apart(view.Snapshot, req.Exclude, avoided)
		choice, err := s.Picker.Pick(view, req)
		if err == nil {
			if q.trial > 0 {
				s.trials.sits(q, &choice.Decode.Instance)
			}
			return choice, view.Snapshot.Version, nil
		}
		if !q.forwarded && s.Members.OnlyEmbeds(view.Snapshot, q.top.Model) {
			return nil, 0, openai.BadRequest("model", "the model %q does not generate text: its engines have /v1/embeddings and the like", openai.Clip(q.top.Model))
		}
		wait := s.gate.get().PairWait
		if !errors.Is(err, pick.ErrNoPair) && len(view.Snapshot.Members) > 0 {
			wait = 0 // waiting does not make a model known
		}
		if len(view.Snapshot.Members) == 0 {
			err = fmt.Errorf("%w: there are no workers", pick.ErrNoPair)
		}
		if returning = returning || q.returning(); returning {
			wait = returnWait
		}
		if wait == 0 {
			return nil, 0, pickError(err, q.top.Model)
		}
		reopened, reopens := reopening(err)
		if timer == nil {
			timer = time.NewTimer(wait)
			defer timer.Stop()
			q.setState(statePicking)
		}
		select {
		case <-changed:
		case <-probed:
		case <-reopened:
		case <-reopens:
		case <-timer.C:
			if !returning && !q.returning() {
				return nil, 0, pickError(err, q.top.Model)
			}
			timer.Reset(wait)
		case <-q.ctx.Done():
			return nil, 0, contextError(&q.ctx)
		}
	}
}

// still leaves out of some workers those that have been started again since they were tried.
func (q *request) still(now *fleet.Snapshot, ids []string) []string {
	if len(q.attempts) == 0 {
		return ids
	}
	return slices.DeleteFunc(slices.Clone(ids), func(id string) bool {
		m := now.Get(id)
		return m != nil && q.tried(id, func(*fleet.Instance) bool { return true }) && !q.tried(id, func(i *fleet.Instance) bool { return i.Epoch == m.Epoch })
	})
}

// maxHead is how much of a prompt's beginning counts for consistent hashing.
const maxHead = 1 << 10

// pickRequest is what the choice of a pair depends on. It keeps in reaches what the index
// knows, for findPeer.
func (q *request) pickRequest(exclude, avoid []string, prefer string) *pick.Request {
	if !q.forwarded {
		exclude = append(exclude[:len(exclude):len(exclude)], q.s.Members.Embedders()...)
	}
	if q.top.Bound {
		exclude = append(exclude[:len(exclude):len(exclude)], unbound(q.s.fleet.Snapshot())...)
	}
	req := &pick.Request{Model: q.top.Model, Chain: q.chain, Tokens: q.top.PromptTokens(), Length: q.top.PromptTokens() + max(q.top.MaxTokens, 1), Output: q.output(), Seqs: q.top.N,
		Exclude: exclude, Avoid: avoid, Prefer: prefer, Explain: q.explain, Session: q.session,
		Head: q.top.Prompt[:min(len(q.top.Prompt), maxHead)], Local: q.couldServeAlone}
	if q.tenant != nil {
		req.Gap = q.tenant.gap
	}
	q.reaches = q.reaches[:0]
	if !q.probe {
		q.reaches = q.s.Feeds.Warm(&q.ctx, &sense.Prompt{Top: &q.top, Body: q.body, Cache: q.cacheSalt()}, req, q.reaches)
	}
	return req
}

// unbound are the native workers that would not follow what binds an answer, though as prefill they may
// serve one that does: then it draws the first token too.
func unbound(now *fleet.Snapshot) (ids []string) {
	for i := range now.Members {
		if m := &now.Members[i]; m.Dialect == fleet.Native && !m.Grammars && m.Role != fleet.Prefill {
			ids = append(ids, m.ID)
		}
	}
	return ids
}

// reopening returns two channels that say when a worker's guard may let a pair come: one
// for a change of the guard, one for the end of its time. Both are nil if no guard is in
// the way.
func reopening(err error) (changed <-chan struct{}, due <-chan time.Time) {
	shut, ok := errors.AsType[*pick.Shut](err)
	if !ok {
		return nil, nil
	}
	if !shut.Until.IsZero() {
		due = time.After(time.Until(shut.Until))
	}
	return shut.Changed, due
}

// output estimates how many tokens will be generated.
func (q *request) output() int {
	n := q.top.MaxTokens
	if n == 0 {
		if n = 16; q.top.Messages {
			n = 256
		}
	}
	return n * q.top.N
}

func (q *request) firstByte() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.state, q.since = stateRelay, time.Now()
	if q.first.IsZero() { // else a stream is taken over
		q.first = q.since
	}
}

// couldServeAlone reports whether decode of a dialect could serve the whole request though
// it can be split.
func (q *request) couldServeAlone(name string) bool {
	d := dialect.For(name)
	return d != nil && !q.probe && (d.Typed || d.Falls) && d.Cannot(&q.top) == ""
}

// learned tells the picker how long the first byte took.
func (q *request) learned(ans *answer) {
	n := len(q.attempts)
	if n == 0 || q.probe || q.first.IsZero() || ans == nil || ans.status != 200 {
		return
	}
	a := q.attempts[n-1]
	if a.d.role == fleet.Prefill { // it generated nothing
		return
	}
	var prefill time.Duration
	if p := a.p.record(); p.State == legDone && p.Since.Before(q.first) {
		prefill = p.Since.Sub(a.start)
	}
	if a.choice.Local != "" {
		q.s.metrics.local.WithLabelValues(a.choice.Local).Inc()
	}
	if q.s.Hedge.Enabled {
		q.s.hedges.first.add(q.first.Sub(q.dispatched))
	}
	a.choice.Answered(prefill, q.first.Sub(a.start))
}

// findPeer returns the worker outside the pair that has kv_events.peer_tokens more of the
// prompt than either of the two; of several, the one whose hit is worth most, since slow
// tiers deliver late. Nil if there is none to fetch from.
func (a *attempt) findPeer() *dialect.Peer {
	q := a.q
	if len(q.reaches) == 0 || a.rules == nil || !a.rules.Peers {
		return nil
	}
	own := 0
	for _, h := range q.reaches {
		if h.ID == a.p.inst.ID || h.ID == a.d.inst.ID {
			own = max(own, h.Tokens)
		}
	}
	var best *dialect.Peer
	worth := 0.0
	now := q.s.fleet.Snapshot()
	for _, h := range q.reaches {
		if h.Tokens < own+q.s.PeerTokens || best != nil && h.Worth <= worth {
			continue
		}
		if m := now.Get(h.ID); m != nil && m.Epoch == h.Epoch && gives(m, a.d.inst) {
			worth = h.Worth
			best = &dialect.Peer{Instance: &m.Instance, Tokens: h.Tokens}
		}
	}
	return best
}

// gives reports whether m's blocks fit the worker to.
func gives(m *fleet.Member, to *fleet.Instance) bool {
	return m.Serves() && m.Dialect == to.Dialect && m.KVAddr != "" && m.URL != "" && m.ModelFingerprint == to.ModelFingerprint &&
		m.TokenizerFingerprint == to.TokenizerFingerprint && m.Numerics == to.Numerics
}
