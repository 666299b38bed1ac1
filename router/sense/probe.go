package sense

import (
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// prober sends each worker one one-token request through a pair before users'
// requests may use it: once for each id, epoch and role, marked, and outside
// the user metrics. What passed stays passed; liveness is the fleet's matter.
type prober struct {
	ms   *Members
	try  Trier
	poke chan struct{}

	mu        sync.Mutex
	gen       uint64
	change    chan struct{} // closed and renewed with gen
	known     map[probeKey]*probeState
	embed     []string // see embedders; replaced, never changed
	generated bool     // see haveGenerated
}

type probeKey struct {
	id    string
	epoch uint64
	role  fleet.Role
}

type probeState struct {
	ok      bool
	embeds  bool // it generates nothing, but has other paths
	refuses bool // it does not take us for its fleet
	running bool
	fails   int
	next    time.Time // not before
	err     string
}

const (
	probesAtOnce   = 8
	probeFirstWait = 100 * time.Millisecond // after a failure, doubling
	probeMaxWait   = 2 * time.Second
	probeRefused   = 10 * time.Second // after ErrRefusesUs, which people have to mend
	probeQuiet     = 3                // failures in a row that are not warned of: 0.7 s
)

func newProber(ms *Members) *prober {
	return &prober{ms: ms, poke: make(chan struct{}, 1), change: make(chan struct{}), known: map[probeKey]*probeState{}}
}

func keyOf(m *fleet.Member) probeKey { return probeKey{m.ID, m.Epoch, m.Role} }

// passed reports whether m may serve users.
func (p *prober) passed(m *fleet.Member) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.known[keyOf(m)]
	return s != nil && s.ok
}

// state is what the admin API shows of m: passed, or the last error.
func (p *prober) state(m *fleet.Member) (ok bool, err string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.known[keyOf(m)]
	if s == nil {
		return false, ""
	}
	return s.ok, s.err
}

// embedders are the workers that passed and generate nothing; mostly nil.
func (p *prober) embedders() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.embed
}

// haveGenerated reports whether any worker has ever passed by generating.
func (p *prober) haveGenerated() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.generated
}

func (p *prober) generation() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gen
}

// changed returns a channel that closes when more workers have passed.
func (p *prober) changed() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.change
}

// wake makes loop look at the fleet.
func (p *prober) wake() {
	select {
	case p.poke <- struct{}{}:
	default:
	}
}

// loop starts probes until the router ends.
func (p *prober) loop() {
	slots := make(chan struct{}, probesAtOnce)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-p.poke:
		case <-timer.C:
		case <-p.ms.Ctx.Done():
			return
		}
		pairs, wait := p.plan(p.ms.Fleet.Snapshot())
		for _, pair := range pairs {
			select {
			case slots <- struct{}{}:
			case <-p.ms.Ctx.Done():
				return
			}
			if !p.ms.Spawn(func() {
				defer func() { <-slots }()
				p.probe(pair)
			}) {
				return
			}
		}
		timer.Reset(wait)
	}
}

// Trier sends a probe: a request of one token, bound to a pair and marked. The
// error is nil if both legs ended well; a *ProbeError says more.
type Trier interface {
	Try(pr *Pair, path, fields string) error
}

// ProbeError is why a probe failed.
type ProbeError struct {
	Err      error
	Status   int  // that an engine answered
	Full     bool // a worker has no room
	Refuses  bool // a worker does not take us for its fleet
	Shortage bool // of the router's own; no worker is at fault
}

func (e *ProbeError) Error() string { return e.Err.Error() }

// Pair is one probe to send.
type Pair struct {
	p, D    *fleet.Member
	Version uint64
}

// Members is the two, or the one that has no partner.
func (pr *Pair) Members() []*fleet.Member {
	if pr.p == pr.D {
		return []*fleet.Member{pr.D}
	}
	return []*fleet.Member{pr.p, pr.D}
}

// plan pairs every worker that has yet to pass with a partner, preferring one
// that has passed or is not being probed, and says when to look again.
func (p *prober) plan(s *fleet.Snapshot) ([]Pair, time.Duration) {
	now := time.Now()
	wait := time.Minute
	var out []Pair
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forget(s)
	for i := range s.Members {
		m := &s.Members[i]
		if !m.Usable() {
			continue
		}
		st := p.known[keyOf(m)]
		if st == nil {
			st = &probeState{}
			p.known[keyOf(m)] = st
		}
		if st.ok || st.running {
			continue
		}
		if d := st.next.Sub(now); d > 0 {
			wait = min(wait, d)
			continue
		}
		if partner := p.partner(s, m, st.fails, now); partner != nil {
			pr := Pair{p: m, D: partner, Version: s.Version}
			if m.Role == fleet.Decode {
				pr.p, pr.D = partner, m
			}
			for _, x := range pr.Members() {
				st := p.known[keyOf(x)]
				st.running, st.refuses = true, false
			}
			out = append(out, pr)
		}
	}
	return out, wait
}

// partner chooses whom to probe m with; after failures others get their turn.
func (p *prober) partner(s *fleet.Snapshot, m *fleet.Member, turn int, now time.Time) *fleet.Member {
	if m.Alone() {
		return m
	}
	var passed, fresh []*fleet.Member
	for i := range s.Members {
		o := &s.Members[i]
		if o.Role == m.Role || !o.Usable() {
			continue
		}
		a, b := &m.Instance, &o.Instance
		if m.Role == fleet.Decode {
			a, b = b, a
		}
		if fleet.Compatible(a, b) != nil {
			continue
		}
		st := p.known[keyOf(o)]
		if st == nil {
			st = &probeState{}
			p.known[keyOf(o)] = st
		}
		switch {
		case st.ok:
			passed = append(passed, o)
		case !st.running && !(st.refuses && now.Before(st.next)):
			fresh = append(fresh, o)
		}
	}
	all := append(passed, fresh...)
	if len(all) == 0 {
		return nil
	}
	return all[turn%len(all)]
}

// forget drops what is known of members that are no more, and of dead ones
// that do not announce themselves: should they come back, it is as another
// process under the same epoch. p.mu is held.
func (p *prober) forget(s *fleet.Snapshot) {
	for k := range p.known {
		if m := s.Get(k.id); m == nil || keyOf(m) != k || m.State == fleet.Dead && m.Source != fleet.NATS {
			delete(p.known, k)
		}
	}
	p.embed = nil
	for k, st := range p.known {
		if st.ok && st.embeds {
			p.embed = append(p.embed, k.id)
		}
	}
}

// probe sends one and notes the result for both members.
func (p *prober) probe(pr Pair) {
	changed, err := p.learn(pr)
	if changed {
		p.mu.Lock()
		for _, m := range pr.Members() {
			if st := p.known[keyOf(m)]; st != nil {
				st.running = false
			}
		}
		p.mu.Unlock()
		p.wake()
		return
	}
	embeds := false
	if err == nil {
		err = p.try.Try(&pr, "/v1/completions", `"prompt":"Hi","max_tokens":1,"temperature":0,"ignore_eos":true`)
		if no := (*ProbeError)(nil); errors.As(err, &no) && slices.Contains(noSuchPath, no.Status) && pr.D.Alone() &&
			p.try.Try(&pr, "/v1/embeddings", `"input":"Hi"`) == nil {
			embeds, err = true, nil
		}
	}
	result := "ok"
	if err != nil && p.ms.Ctx.Err() != nil {
		return // cut by the router's own end
	}
	lack := false
	if err != nil {
		result = "failed"
		if f := (*ProbeError)(nil); errors.As(err, &f) && f.Shortage {
			result, lack = "shortage", true
		}
		p.ms.Log.Log(p.ms.Ctx, p.level(pr, err), "probe failed", "prefill", pr.p.ID, "decode", pr.D.ID, "err", err.Error())
	}
	p.ms.sent.WithLabelValues(result).Inc()
	p.mu.Lock()
	for _, m := range pr.Members() {
		st := p.known[keyOf(m)]
		if st == nil {
			continue // it is no more
		}
		st.running = false
		if err == nil {
			st.ok, st.embeds, st.refuses, st.err, st.fails = true, embeds, false, "", 0
			if embeds {
				p.embed = append(slices.Clone(p.embed), m.ID)
				p.ms.Log.Info("engine embeds and does not generate", "id", m.ID)
			}
		} else if lack {
			st.next = time.Now().Add(probeMaxWait)
		} else if !st.ok && !st.refuses { // which refused has noted
			st.err = err.Error()
			st.next = time.Now().Add(min(probeFirstWait<<min(st.fails, 10), probeMaxWait))
			st.fails++
		}
	}
	if err == nil {
		p.generated = p.generated || !embeds
		p.gen++
		close(p.change)
		p.change = make(chan struct{})
	}
	p.mu.Unlock()
	p.wake()
}

// refused notes that a worker does not take us for its fleet. It gets no more
// requests until a probe, some time later, finds that it does.
func (p *prober) refused(inst *fleet.Instance) {
	p.mu.Lock()
	defer p.mu.Unlock()
	st := p.known[probeKey{inst.ID, inst.Epoch, inst.Role}]
	if st == nil {
		return
	}
	if st.ok {
		p.gen++
	}
	st.ok, st.refuses, st.err, st.next = false, true, ErrRefusesUs.Error(), time.Now().Add(probeRefused)
	p.wake()
}

// level is a warning's where somebody should look: not for a worker that is
// full or leaves, and, as the end of its connections may be seen before the news
// that it leaves, not for the first probes of a pair that fail.
func (p *prober) level(pr Pair, err error) slog.Level {
	if f := (*ProbeError)(nil); errors.As(err, &f) {
		switch {
		case f.Full:
			return slog.LevelInfo
		case f.Refuses:
			return slog.LevelWarn // it does not mend itself
		}
	}
	s := p.ms.Fleet.Snapshot()
	p.mu.Lock()
	defer p.mu.Unlock()
	fails := 0
	for _, m := range pr.Members() {
		if now := s.Get(m.ID); now == nil || keyOf(now) != keyOf(m) || !now.Usable() || p.ms.Drained(now) {
			return slog.LevelInfo
		}
		if st := p.known[keyOf(m)]; st != nil {
			fails = max(fails, st.fails)
		}
	}
	if fails < probeQuiet {
		return slog.LevelInfo
	}
	return slog.LevelWarn
}

// noSuchPath is how engines answer for a path that their model has no use for:
// there is no route, or it is not supported, which vLLM says by 400.
var noSuchPath = []int{400, 404, 405, 422, 501}
