package sense

import (
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// probed is what the probes have found so far. A newer one replaces it.
type probed struct {
	generation uint64
	change     chan struct{} // closes when more workers have passed
	embedders  []string      // workers that passed and generate nothing; mostly nil
	generated  bool          // whether any worker has ever passed by generating
}

// publish replaces what the probes have found; probeMu is held.
func (ms *Members) publish(edit func(*probed)) {
	next := *ms.probed.Load()
	edit(&next)
	ms.probed.Store(&next)
}

// Probed returns a channel that closes when more workers have passed their probe.
func (ms *Members) Probed() <-chan struct{} { return ms.probed.Load().change }

// Embedders are the workers that passed and generate nothing; mostly nil.
func (ms *Members) Embedders() []string { return ms.probed.Load().embedders }

type probeKey struct {
	id    string
	epoch uint64
	role  fleet.Role
}

// probeState is what is known of a worker of one id, epoch and role. It is probed once:
// what passed stays passed, as the fleet watches whether it lives.
type probeState struct {
	ok      bool
	embeds  bool // it generates nothing, but serves other paths
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
	probeRefused   = 10 * time.Second // after ErrRefusesUs, which an operator must fix
	probeQuiet     = 3                // failures in a row without a warning: 0.7 s
)

func keyOf(m *fleet.Member) probeKey { return probeKey{m.ID, m.Epoch, m.Role} }

func (ms *Members) passed(m *fleet.Member) bool {
	ok, _ := ms.ProbeState(m)
	return ok
}

// ProbeState is what the admin API shows of m: passed, or the last error.
func (ms *Members) ProbeState(m *fleet.Member) (ok bool, err string) {
	ms.probeMu.Lock()
	defer ms.probeMu.Unlock()
	if s := ms.known[keyOf(m)]; s != nil {
		return s.ok, s.err
	}
	return false, ""
}

// wakeProbes has probeLoop look at the fleet.
func (ms *Members) wakeProbes() {
	select {
	case ms.poke <- struct{}{}:
	default:
	}
}

// probeLoop starts probes until the router ends.
func (ms *Members) probeLoop() {
	slots := make(chan struct{}, probesAtOnce)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ms.poke:
		case <-timer.C:
		case <-ms.Ctx.Done():
			return
		}
		pairs, wait := ms.plan(ms.Fleet.Snapshot())
		for _, pair := range pairs {
			select {
			case slots <- struct{}{}:
			case <-ms.Ctx.Done():
				return
			}
			if !ms.Spawn(func() {
				defer func() { <-slots }()
				ms.probe(pair)
			}) {
				return
			}
		}
		timer.Reset(wait)
	}
}

// Trier sends a probe: a marked request for one token through a pair, outside the user
// metrics. The error is nil if both legs ended well; a *ProbeError says more.
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
	Prefill, Decode *fleet.Member
	Version         uint64
}

// Members is the two, or the one that does both phases.
func (pr *Pair) Members() []*fleet.Member {
	if pr.Prefill == pr.Decode {
		return []*fleet.Member{pr.Decode}
	}
	return []*fleet.Member{pr.Prefill, pr.Decode}
}

// state finds or makes what is known of m; probeMu is held.
func (ms *Members) state(m *fleet.Member) *probeState {
	st := ms.known[keyOf(m)]
	if st == nil {
		st = &probeState{}
		ms.known[keyOf(m)] = st
	}
	return st
}

// plan pairs every worker that has yet to pass with a partner, preferably one that has
// passed or is not being probed, and says when to look again.
func (ms *Members) plan(s *fleet.Snapshot) ([]Pair, time.Duration) {
	now := time.Now()
	wait := time.Minute
	var out []Pair
	ms.probeMu.Lock()
	defer ms.probeMu.Unlock()
	ms.forget(s)
	for i := range s.Members {
		m := &s.Members[i]
		if !m.Usable() {
			continue
		}
		st := ms.state(m)
		if st.ok || st.running {
			continue
		}
		if d := st.next.Sub(now); d > 0 {
			wait = min(wait, d)
			continue
		}
		if partner := ms.partner(s, m, st.fails, now); partner != nil {
			pr := Pair{Prefill: m, Decode: partner, Version: s.Version}
			if m.Role == fleet.Decode {
				pr.Prefill, pr.Decode = partner, m
			}
			for _, x := range pr.Members() {
				st := ms.state(x)
				st.running, st.refuses = true, false
			}
			out = append(out, pr)
		}
	}
	return out, wait
}

// partner chooses whom to probe m with; after failures others get their turn.
func (ms *Members) partner(s *fleet.Snapshot, m *fleet.Member, turn int, now time.Time) *fleet.Member {
	if m.Alone() {
		return m
	}
	var passed, fresh []*fleet.Member
	for i := range s.Members {
		o := &s.Members[i]
		if o.Role == m.Role || !o.Usable() || ms.Drained(o) {
			continue
		}
		a, b := &m.Instance, &o.Instance
		if m.Role == fleet.Decode {
			a, b = b, a
		}
		if fleet.Compatible(a, b) != nil {
			continue
		}
		switch st := ms.state(o); {
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

// forget drops what is known of members that left, and of dead ones that do not announce
// themselves: they may come back as another process under the same epoch. probeMu is held.
func (ms *Members) forget(s *fleet.Snapshot) {
	var embedders []string
	for k, st := range ms.known {
		if m := s.Get(k.id); m == nil || keyOf(m) != k || m.State == fleet.Dead && m.Source != fleet.NATS {
			delete(ms.known, k)
		} else if st.ok && st.embeds {
			embedders = append(embedders, k.id)
		}
	}
	ms.publish(func(n *probed) { n.embedders = embedders })
}

// probe sends one and notes the result for both members.
func (ms *Members) probe(pr Pair) {
	changed, err := ms.learn(pr)
	if changed {
		ms.probeMu.Lock()
		for _, m := range pr.Members() {
			if st := ms.known[keyOf(m)]; st != nil {
				st.running = false
			}
		}
		ms.probeMu.Unlock()
		ms.wakeProbes()
		return
	}
	embeds := false
	if err == nil {
		err = ms.trier.Try(&pr, "/v1/completions", `"prompt":"Hi","max_tokens":1,"temperature":0,"ignore_eos":true`)
		if no, ok := errors.AsType[*ProbeError](err); ok && slices.Contains(noSuchPath, no.Status) && pr.Decode.Alone() &&
			ms.trier.Try(&pr, "/v1/embeddings", `"input":"Hi"`) == nil {
			embeds, err = true, nil
		}
	}
	if err != nil && ms.Ctx.Err() != nil {
		return // cut by the router's own end
	}
	result, short := "ok", false
	if err != nil {
		result = "failed"
		if f, ok := errors.AsType[*ProbeError](err); ok && f.Shortage {
			result, short = "shortage", true
		}
		ms.Log.Log(ms.Ctx, ms.level(pr, err), "probe failed", "prefill", pr.Prefill.ID, "decode", pr.Decode.ID, "err", err.Error())
	}
	ms.sent.WithLabelValues(result).Inc()
	ms.probeMu.Lock()
	for _, m := range pr.Members() {
		st := ms.known[keyOf(m)]
		if st == nil {
			continue // it left
		}
		st.running = false
		if err == nil {
			st.ok, st.embeds, st.refuses, st.err, st.fails = true, embeds, false, "", 0
			if embeds {
				ms.publish(func(n *probed) { n.embedders = append(slices.Clone(n.embedders), m.ID) })
				ms.Log.Info("engine embeds and does not generate", "id", m.ID)
			}
		} else if short {
			st.next = time.Now().Add(probeMaxWait)
		} else if !st.ok && !st.refuses { // refused has noted it
			st.err = err.Error()
			st.next = time.Now().Add(min(probeFirstWait<<min(st.fails, 10), probeMaxWait))
			st.fails++
		}
	}
	if err == nil {
		old := ms.probed.Load().change
		ms.publish(func(n *probed) {
			n.generation, n.generated, n.change = n.generation+1, n.generated || !embeds, make(chan struct{})
		})
		close(old)
	}
	ms.probeMu.Unlock()
	ms.wakeProbes()
}

// refused notes that a worker does not take us for its fleet. It gets no more requests until
// a later probe finds that it does.
func (ms *Members) refused(inst *fleet.Instance) {
	ms.probeMu.Lock()
	defer ms.probeMu.Unlock()
	st := ms.known[probeKey{inst.ID, inst.Epoch, inst.Role}]
	if st == nil {
		return
	}
	if st.ok {
		ms.publish(func(n *probed) { n.generation++ })
	}
	st.ok, st.refuses, st.err, st.next = false, true, ErrRefusesUs.Error(), time.Now().Add(probeRefused)
	ms.wakeProbes()
}

// level is a warning only where somebody should look: not for a worker that is full or
// leaving, and not for a pair's first failures, as the end of its connections may be seen
// before the news that it leaves.
func (ms *Members) level(pr Pair, err error) slog.Level {
	if f, ok := errors.AsType[*ProbeError](err); ok {
		switch {
		case f.Full:
			return slog.LevelInfo
		case f.Refuses:
			return slog.LevelWarn // it does not fix itself
		}
	}
	s := ms.Fleet.Snapshot()
	ms.probeMu.Lock()
	defer ms.probeMu.Unlock()
	fails := 0
	for _, m := range pr.Members() {
		if now := s.Get(m.ID); now == nil || keyOf(now) != keyOf(m) || !now.Usable() || ms.Drained(now) {
			return slog.LevelInfo
		}
		if st := ms.known[keyOf(m)]; st != nil {
			fails = max(fails, st.fails)
		}
	}
	if fails < probeQuiet {
		return slog.LevelInfo
	}
	return slog.LevelWarn
}

// noSuchPath is how engines answer a path that their model has no use for: there is no
// route, or it is not supported, for which vLLM answers 400.
var noSuchPath = []int{400, 404, 405, 422, 501}
