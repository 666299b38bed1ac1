package kvconntest

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// Layout is a small pool with all that a layout can have: blocks of 4 tokens, a layer of
// ordinary attention, one of latent attention, and one of a window of 128 positions in
// FP8, of which this rank of a tensor-parallel worker has two of four heads.
func Layout() kvlayout.Layout {
	all := kvlayout.Heads{Count: 2, Total: 2}
	return kvlayout.Layout{BlockTokens: 4, Groups: []kvlayout.Group{
		{Kind: kvlayout.Full, Layers: kvlayout.Run(0, 1), Planes: kvlayout.KV(8), Heads: all, DType: kvlayout.F32},
		{Kind: kvlayout.Latent, Layers: kvlayout.Run(1, 1), Planes: []kvlayout.Plane{{Name: "latent", Dim: 24}, {Name: "rope", Dim: 8}},
			Heads: kvlayout.Heads{Count: 1, Total: 1}, DType: kvlayout.F32},
		{Kind: kvlayout.Window, Layers: kvlayout.Run(2, 1), Planes: kvlayout.KV(28), Heads: kvlayout.Heads{First: 2, Count: 2, Total: 4}, Window: 128,
			DType: kvlayout.F8E4M3, Scale: kvlayout.F32},
	}}
}

// Plain is a layout of ordinary layers only, as devices have them.
func Plain() kvlayout.Layout { return kvlayout.Plain(3, 2, 8, 4, kvlayout.F32) }

// Config returns settings for a test peer: defaults, with every wait divided
// by shrink.
func Config(id string, shrink int) kvconn.Config { return config(id, shrink, 1) }

// config is Config with every wait multiplied by stretch.
func config(id string, shrink int, stretch float64) kvconn.Config {
	c := kvconn.DefaultConfig()
	c.Identity = kvconn.Identity{PeerID: kvconn.PeerID{ID: id, Epoch: 1}, ModelFingerprint: "model", TokenizerFingerprint: "tokenizer",
		Numerics: "test-1", Layout: Layout(), Build: "test"}
	for _, d := range []*time.Duration{&c.DialTimeout, &c.HandshakeTimeout, &c.KeepAlive, &c.PeerSilence, &c.AcceptTimeout,
		&c.RepairTimeout, &c.RevokeTimeout} {
		*d = time.Duration(float64(*d) * stretch / float64(shrink))
	}
	c.TicketTimeout = 3 * c.PeerSilence
	c.Ring = ringOf(fleetSecret)
	c.BatchBytes = 1 // a frame for each block of a layer, so that faults hit single ones
	return c
}

// World is one receiver and one sender over a transport. It checks the promises of both
// sides as they run.
type World struct {
	T        testing.TB
	Receiver *kvconn.Receiver
	Server   *kvconn.Server
	Addr     string
	Pool     *Pool
	RConfig  kvconn.Config
	SConfig  kvconn.Config
	RMetrics *prometheus.Registry
	SMetrics *prometheus.Registry

	// Answer, when set, replaces Compute as the answer to a ticket.
	Answer func(ctx context.Context, o *kvconn.Outgoing, src *Source)

	// Clock measures how long things take; nil is the time of package time.
	Clock *Clock

	// Quarantine lets Fetch leave a revoked ticket to Release when the peer that
	// shares our memory does not acknowledge.
	Quarantine bool

	stretch float64    // of the deadlines, for a slow machine
	blocks  *gpuBlocks // of the sender's device, if it has one
	ranks   int        // of the sender
	stop    context.CancelFunc
	wg      sync.WaitGroup
	serve   error // of the server, when wg is done
	late    error // what took too long in a fault's case

	mu          sync.Mutex
	sources     []*Source
	ends        []ticket.Outcome
	quarantined []quarantined
}

// NewWorld starts both sides over tr; tune may change either configuration.
func NewWorld(t testing.TB, tr kvconn.Transport, addr string, shrink int, tune func(r, s *kvconn.Config)) *World {
	t.Helper()
	return newWorld(t, tr, addr, Factory{Shrink: shrink, stretch: 1}, tune)
}

// newWorld is NewWorld with the factory's memory, clock and deadlines.
func newWorld(t testing.TB, tr kvconn.Transport, addr string, f Factory, tune func(r, s *kvconn.Config)) *World {
	t.Helper()
	w := &World{T: t, Clock: f.clock, stretch: f.stretch, ranks: f.SenderRanks, RConfig: config("decode-0", f.Shrink, f.stretch), SConfig: config("prefill-0", f.Shrink, f.stretch)}
	if f.gpus.Sender != nil {
		w.RConfig.Identity.Layout, w.SConfig.Identity.Layout = f.gpus.Receiver.Layout(), f.gpus.Sender.Layout()
	}
	if tune != nil {
		tune(&w.RConfig, &w.SConfig)
	}
	w.Pool = NewPool(w.RConfig.Identity.Layout, ReceiverBlocks)
	switch {
	case f.Ranks > 1 && (f.private || f.Memory == nil):
		check(t, w.Pool.Divide(f.Ranks))
	case f.private:
	case f.Memory != nil:
		var err error
		w.RConfig.Shared, err = w.Pool.Share(max(f.Ranks, 1), func(size int) (int, []byte) { return f.Memory(t, size) })
		check(t, err)
	case f.gpus.Receiver != nil && reflect.DeepEqual(w.RConfig.Identity.Layout, f.gpus.Receiver.Layout()): // else it is not that device's
		w.RConfig.Shared = w.Pool.ShareGPU(f.gpus.Receiver)
		if reflect.DeepEqual(w.SConfig.Identity.Layout, f.gpus.Sender.Layout()) {
			w.blocks = newGPUBlocks(f.gpus.Sender)
		}
	}
	if ch, ok := tr.(*Chaos); ok && f.shares() {
		ch.Memory = w.Pool
	}
	w.RMetrics, w.SMetrics = prometheus.NewPedanticRegistry(), prometheus.NewPedanticRegistry()
	rm, err := kvconn.NewMetrics(w.RMetrics)
	check(t, err)
	sm, err := kvconn.NewMetrics(w.SMetrics)
	check(t, err)
	log := slog.New(slog.DiscardHandler)
	w.Receiver, err = kvconn.NewReceiver(w.RConfig, tr, log, rm)
	check(t, err)
	w.Server, err = kvconn.NewServer(w.SConfig, log, sm)
	check(t, err)
	ln, err := tr.Listen(addr)
	check(t, err)
	w.Addr = ln.Addr().String()
	var ctx context.Context
	ctx, w.stop = context.WithCancel(context.Background())
	w.wg.Go(func() { w.serve = w.Server.Serve(ctx, ln, w) })
	return w
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// OnTicket answers a ticket, and notes how it ends.
func (w *World) OnTicket(ctx context.Context, o *kvconn.Outgoing) {
	layout := w.SConfig.Identity.Layout
	src := &Source{Layout: layout, Seed: Seed(o.Ticket().Tokens), pool: w.blocks, blocks: map[int]int32{},
		rows: map[poolKey]bool{}, positions: o.Ticket().Positions, Ranks: w.ranks}
	w.mu.Lock()
	w.sources = append(w.sources, src)
	answer := w.Answer
	w.mu.Unlock()
	if answer == nil {
		answer = w.Compute
	}
	answer(ctx, o, src)
	<-o.Done()
	src.Free()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ends = append(w.ends, kvconn.OutcomeOf(o.Err(), "untyped"))
}

// Compute is the ordinary answer: it pushes layer by layer, the blocks of a layer in any
// order, then commits the request id.
func (w *World) Compute(ctx context.Context, o *kvconn.Outgoing, src *Source) {
	if o.Accept(src) == nil {
		for l := range src.Layout.Layers() {
			o.Push(l, rand.Perm(len(o.Ticket().Dest)))
		}
		o.Commit([]byte("commit of " + o.Ticket().RequestID))
	}
}

// answerFunc answers a ticket; see World.Answer.
type answerFunc func(ctx context.Context, o *kvconn.Outgoing, src *Source)

// answerTo answers the tickets of one name in one way, and others in another.
func answerTo(name string, answer, others answerFunc) answerFunc {
	return func(ctx context.Context, o *kvconn.Outgoing, src *Source) {
		if o.Ticket().RequestID == name {
			answer(ctx, o, src)
		} else {
			others(ctx, o, src)
		}
	}
}

// Seed is the sequence that a prompt stands for.
func Seed(tokens []int32) uint64 {
	var s uint64
	for _, t := range tokens {
		s = mix(s ^ uint64(uint32(t)))
	}
	return s
}

// Prompt makes n tokens.
func Prompt(seed int32, n int) []int32 {
	p := make([]int32, n)
	for i := range p {
		p[i] = seed + int32(i)
	}
	return p
}

// Spec is a ticket for a prompt of n tokens into blocks from first on.
func (w *World) Spec(name string, seed int32, n, first int) kvconn.TicketSpec {
	bt := w.RConfig.Identity.Layout.BlockTokens
	dest := w.Pool.Dest(first, (n+bt-1)/bt)
	return kvconn.TicketSpec{Link: ticket.NewLink(), RequestID: name, Tokens: Prompt(seed, n), Dest: dest, Sink: w.Pool.Sink(dest)}
}

// Fetch opens a session, sends a ticket, waits and revokes. On success it checks every
// byte; on failure it checks that the error is typed, and gives the blocks a new
// generation, as a receiver does.
func (w *World) Fetch(ctx context.Context, spec kvconn.TicketSpec) error {
	return w.FetchFrom(ctx, w.Addr, w.SConfig.Identity.PeerID, spec)
}

// FetchFrom is Fetch from another sender than the world's.
func (w *World) FetchFrom(ctx context.Context, addr string, peer kvconn.PeerID, spec kvconn.TicketSpec) error {
	in, err := w.requestFrom(ctx, addr, peer, spec)
	if err != nil {
		return w.typed(err)
	}
	c, err := in.Wait(ctx)
	if rerr := w.revoke(ctx, in, err != nil); rerr != nil && err != nil && w.Quarantine {
		w.mu.Lock()
		w.quarantined = append(w.quarantined, quarantined{in, spec.Dest})
		w.mu.Unlock()
		return w.typed(err)
	} else if rerr != nil {
		w.T.Errorf("%s: revoke: %v", spec.RequestID, rerr)
	}
	if err != nil {
		w.Pool.Reclaim(spec.Dest)
		return w.typed(err)
	}
	if want := "commit of " + spec.RequestID; string(c.Payload) != want {
		w.T.Errorf("%s: commit %q, want %q", spec.RequestID, c.Payload, want)
	}
	had := func(l, i int) bool { return spec.Have != nil && spec.Have[i] }
	if err := w.Pool.Check(Seed(spec.Tokens), spec.Dest, len(spec.Tokens), had); err != nil {
		w.T.Errorf("%s: wrong bytes believed: %v", spec.RequestID, err)
	}
	return nil
}

func (w *World) requestFrom(ctx context.Context, addr string, peer kvconn.PeerID, spec kvconn.TicketSpec) (*kvconn.Incoming, error) {
	s, err := w.Receiver.Open(ctx, addr, peer)
	if err != nil {
		return nil, err
	}
	return s.Request(ctx, spec)
}

// open returns a session with the world's sender.
func (w *World) open() *kvconn.Session {
	w.T.Helper()
	s, err := w.Receiver.Open(w.T.Context(), w.Addr, w.SConfig.Identity.PeerID)
	check(w.T, err)
	return s
}

// request sends a ticket to the world's sender.
func (w *World) request(spec kvconn.TicketSpec) *kvconn.Incoming {
	w.T.Helper()
	in, err := w.open().Request(w.T.Context(), spec)
	check(w.T, err)
	return in
}

// expect transfers, and checks the outcome.
func (w *World) expect(want ticket.Outcome, spec kvconn.TicketSpec) {
	w.T.Helper()
	if err := w.Fetch(w.T.Context(), spec); kvconn.OutcomeOf(err, "untyped") != want {
		w.T.Errorf("%s: want %s, have %v", spec.RequestID, want, err)
	}
}

// ended waits for a ticket, and checks its outcome.
func (w *World) ended(want ticket.Outcome, in *kvconn.Incoming) {
	w.T.Helper()
	if _, err := in.Wait(w.T.Context()); kvconn.OutcomeOf(err, "untyped") != want {
		w.T.Errorf("want %s, have %v", want, err)
	}
}

// allEnded checks the outcome of all tickets that the sender has finished.
func (w *World) allEnded(want ticket.Outcome) {
	w.T.Helper()
	for _, o := range w.Ends() {
		if o != want {
			w.T.Errorf("the sender's ticket ended %q, want %q", o, want)
		}
	}
}

// over reports whether a channel is closed.
func over(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// quarantined is a revoked ticket whose peer may still write.
type quarantined struct {
	in   *kvconn.Incoming
	dest []kvconn.Dest
}

// revoke waits only briefly for a failed transfer whose blocks may be quarantined.
func (w *World) revoke(ctx context.Context, in *kvconn.Incoming, failed bool) error {
	if w.Quarantine && failed {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, w.RConfig.KeepAlive)
		defer cancel()
	}
	return in.Revoke(ctx)
}

// Release ends the quarantine of the tickets that Fetch has left in it, and returns their
// number. Their peers must have resumed or died.
func (w *World) Release(ctx context.Context) int {
	w.mu.Lock()
	all := w.quarantined
	w.quarantined = nil
	w.mu.Unlock()
	for _, q := range all {
		if err := q.in.Revoke(ctx); err != nil {
			w.T.Errorf("quarantine does not end: %v", err)
			continue
		}
		w.Pool.Reclaim(q.dest)
	}
	return len(all)
}

func (w *World) typed(err error) error {
	var e *kvconn.Error
	if !errors.As(err, &e) {
		w.T.Errorf("untyped error %T: %v", err, err)
	} else if e.Outcome == "" || e.Outcome == ticket.Done || e.Phase == "" {
		w.T.Errorf("error without outcome or phase: %+v", e)
	}
	return err
}

// long stretches a bound to this machine's speed.
func (w *World) long(d time.Duration) time.Duration { return time.Duration(float64(d) * w.stretch) }

// Empty waits until neither side holds a ticket, at most for limit.
func (w *World) Empty(limit time.Duration) {
	w.T.Helper()
	var left []kvconn.Entry
	if !w.within(limit, func() bool {
		left = append(w.Receiver.Ledger(), w.Server.Ledger()...)
		return len(left) == 0
	}) {
		w.T.Errorf("ledger is not empty after %v: %+v", limit, left)
	}
}

// within polls ok until it holds, at most for limit, and reports whether it did.
func (w *World) within(limit time.Duration, ok func() bool) bool {
	for start := w.Clock.Now(); !ok(); time.Sleep(w.RConfig.KeepAlive / 4) {
		if w.Clock.Since(start) > limit {
			return false
		}
	}
	return true
}

// Until waits for ok, which must not take as long as hangs.
func (w *World) Until(what string, ok func() bool) {
	w.T.Helper()
	for by := time.Now().Add(hangs); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(by) {
			w.T.Fatal("hangs: ", what)
		}
	}
}

// Stop ends the sender.
func (w *World) Stop() { w.stop() }

// hangs is the time after which anything counts as hanging, on any machine.
const hangs = time.Minute

// Close ends both sides and checks the promises that show only at the end.
func (w *World) Close() {
	w.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), w.long(hangs))
	defer cancel()
	if err := w.Receiver.Close(ctx); err != nil {
		w.T.Error(err)
	}
	w.stop()
	w.wg.Wait()
	if w.serve != nil {
		w.T.Errorf("serve: %v", w.serve)
	}
	if v := w.Value(w.SMetrics, "xpyd_kvconn_mapped_pools", ""); v != 0 {
		w.T.Errorf("%v pools are mapped at the end", v)
	}
	w.Pool.untouched()
	for _, e := range w.Pool.Errors() {
		w.T.Error(e)
	}
	for _, reg := range []*prometheus.Registry{w.RMetrics, w.SMetrics} {
		for _, name := range []string{"xpyd_kvconn_active_tickets", "xpyd_kvconn_sessions"} {
			if v := w.Value(reg, name, ""); v != 0 {
				w.T.Errorf("%s is %v at the end", name, v)
			}
		}
	}
	for _, s := range w.sources {
		if _, misuse := s.Loads(); misuse > 0 {
			w.T.Errorf("%d loads after the ticket was done", misuse)
		}
	}
	for _, o := range w.ends {
		if o == "untyped" {
			w.T.Error("a ticket ended with an untyped error on the sender's side")
		}
	}
}

// Value sums the series of a counter or gauge that carry a label value.
func (w *World) Value(reg *prometheus.Registry, name, label string) float64 {
	families, err := reg.Gather()
	check(w.T, err)
	sum := 0.0
	for _, f := range families {
		for _, m := range f.GetMetric() {
			labelled := func(l *dto.LabelPair) bool { return l.GetValue() == label }
			if f.GetName() == name && (label == "" || slices.ContainsFunc(m.GetLabel(), labelled)) {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// Ends lists how the sender's tickets have ended.
func (w *World) Ends() []ticket.Outcome {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.ends)
}
