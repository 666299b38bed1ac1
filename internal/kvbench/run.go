package kvbench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/kvconn"
)

// Peer is the sender's process as the receiver knows it.
type Peer struct {
	Addr       string               // of its control connection
	Transports map[string]Transport // what may be measured, by name
	Log        *slog.Logger
	Progress   io.Writer // one line a step; may be nil
}

// receiver is the process with the clock.
type receiver struct {
	cfg   Config
	peer  Peer
	ctl   *control
	tr    kvconn.Transport
	addr  string // of the sender's kvconn listener
	pool  *pool
	sink  *sink
	kvs   []*kvconn.Receiver
	s     *kvconn.Session          // the one that is measured: with digests checked, or off
	all   map[bool]*kvconn.Session // both, by whether their digests are unchecked
	reg   *prometheus.Registry     // of the first of them
	dests [][]kvconn.Dest          // a sequence of blocks for each transfer at a time
	gen   uint32
	bare  bareLoop

	copies []*memfd.Memory // for the memcpy limits
}

// Run measures what cfg says against the sender at peer.
func Run(ctx context.Context, cfg Config, peer Peer) (*Report, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	r := &receiver{cfg: cfg, peer: peer}
	rep := &Report{Config: cfg}
	err := r.open(ctx, rep)
	defer r.close()
	for _, step := range []func(context.Context, *Report) error{r.throughput, r.latency, r.sweep, r.verify, r.handshakes} {
		if err == nil {
			err = step(ctx, rep)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("bench kv: %w", err)
	}
	if rep.Resent = int(r.metric("xpyd_kvconn_resent_units_total")); rep.Resent > 0 {
		rep.Notes = append(rep.Notes, fmt.Sprintf("%d blocks had to be asked for again", rep.Resent))
	}
	return rep, nil
}

func (r *receiver) say(format string, args ...any) {
	if r.peer.Progress != nil {
		fmt.Fprintf(r.peer.Progress, "bench kv: "+format+"\n", args...)
	}
}

// open meets the sender and makes the pools and the session.
func (r *receiver) open(ctx context.Context, rep *Report) error {
	d := net.Dialer{Timeout: 5 * time.Second}
	c, err := d.DialContext(ctx, "tcp", r.peer.Addr)
	if err != nil {
		return fmt.Errorf("no sender at %s: %w", r.peer.Addr, err)
	}
	r.ctl = newControl(c)
	name, why := r.choose(c)
	rep.Transport, rep.Why = name, why
	r.tr = r.peer.Transports[name].Transport
	if r.tr == nil {
		return fmt.Errorf("no transport %q in this build", name)
	}
	r.say("%s; filling both pools", name)
	a, err := r.ctl.ask(request{Ask: askStart, Config: r.cfg, Transport: name})
	if err != nil {
		return err
	}
	r.addr = a.Addr
	each := r.cfg.blocks(r.cfg.most())
	blocks := each * r.cfg.Concurrency
	if r.pool, err = newPool(r.cfg, blocks, r.peer.Transports[name].Local); err != nil {
		return err
	}
	r.sink = &sink{pool: r.pool}
	ids := order(r.cfg.Scatter, blocks, 2)
	for chunk := range slices.Chunk(ids, each) {
		dest := make([]kvconn.Dest, each)
		for i, b := range chunk {
			dest[i].Block = b
		}
		r.dests = append(r.dests, dest)
	}
	r.reg = prometheus.NewRegistry()
	r.all = map[bool]*kvconn.Session{}
	if err = r.measure(ctx, r.cfg.Digests == "off"); err != nil {
		return err
	}
	if rep.Mapped = r.metric("xpyd_kvconn_mapped_pools") > 0; r.pool.shared != nil && !rep.Mapped {
		rep.Notes = append(rep.Notes, "the sender could not map the pool: rows go through the socket")
	}
	return nil
}

// metric sums the series of one of the session's gauges or counters.
func (r *receiver) metric(name string) (sum float64) {
	all, err := r.reg.Gather()
	if err != nil {
		return 0
	}
	for _, f := range all {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// choose names the transport: shared memory if it is asked for or, with auto, if it
// exists and the sender is on this machine.
func (r *receiver) choose(c net.Conn) (name, why string) {
	if r.cfg.Transport != "auto" {
		return r.cfg.Transport, "asked for"
	}
	host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
	switch _, ok := r.peer.Transports["shm"]; {
	case !ok:
		return "tcp", "no shared memory in this build"
	case !net.ParseIP(host).IsLoopback():
		return "tcp", "the sender is on another machine"
	}
	return "shm", "the sender is on this machine"
}

// measure selects the session with or without digests; both ends agree on that when it
// is opened.
func (r *receiver) measure(ctx context.Context, unchecked bool) error {
	if r.all[unchecked] == nil {
		var reg prometheus.Registerer
		if len(r.all) == 0 {
			reg = r.reg
		}
		kv, s, err := r.session(ctx, reg, unchecked)
		if err != nil {
			return err
		}
		r.kvs, r.all[unchecked] = append(r.kvs, kv), s
	}
	r.s = r.all[unchecked]
	if r.s.Unchecked() != unchecked {
		return errors.New("the sender does not agree on digests")
	}
	r.sink.unchecked.Store(unchecked)
	return nil
}

// session opens one to the sender, on a receiver of its own: a new peer.
func (r *receiver) session(ctx context.Context, reg prometheus.Registerer, unchecked bool) (*kvconn.Receiver, *kvconn.Session, error) {
	m, err := kvconn.NewMetrics(reg)
	if err != nil {
		return nil, nil, err
	}
	cfg := r.cfg.connector("bench-receiver")
	cfg.Shared, cfg.Unchecked = r.pool.shared, unchecked
	kv, err := kvconn.NewReceiver(cfg, r.tr, r.peer.Log, m)
	if err != nil {
		return nil, nil, err
	}
	s, err := kv.Open(ctx, r.addr, kvconn.PeerID{})
	if err != nil {
		closeReceiver(kv)
		return nil, nil, err
	}
	return kv, s, nil
}

func closeReceiver(kv *kvconn.Receiver) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = kv.Close(ctx) // late only when a goroutine hangs; the process ends soon
}

func (r *receiver) close() {
	r.bare.close()
	for _, kv := range r.kvs {
		closeReceiver(kv)
	}
	if r.ctl != nil {
		r.ctl.c.Close()
	}
	if r.pool != nil {
		r.pool.memory.Close()
	}
	for _, m := range r.copies {
		m.Close()
	}
}

// one moves n bytes under one ticket into the blocks of slot.
func (r *receiver) one(ctx context.Context, s *kvconn.Session, slot, n int, sk kvconn.Sink) error {
	dest := r.dests[slot][:r.cfg.blocks(n)]
	in, err := s.Request(ctx, kvconn.TicketSpec{RequestID: "bench", Positions: len(dest) * r.cfg.BlockTokens, Dest: dest, Sink: sk})
	if err != nil {
		return err
	}
	if _, err = in.Wait(ctx); err != nil {
		stop, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		return errors.Join(err, in.Revoke(stop))
	}
	return nil
}

// transfer moves n bytes on every slot at once and returns the time it took.
// The blocks get a new generation, as reused blocks do.
func (r *receiver) transfer(ctx context.Context, n int) (time.Duration, error) {
	r.gen++
	for _, dest := range r.dests {
		for i := range dest {
			dest[i].Generation = r.gen
		}
	}
	begun := time.Now()
	if len(r.dests) == 1 {
		err := r.one(ctx, r.s, 0, n, r.sink)
		return time.Since(begun), err
	}
	errs := make([]error, len(r.dests))
	var wg sync.WaitGroup
	for slot := range r.dests {
		wg.Go(func() { errs[slot] = r.one(ctx, r.s, slot, n, r.sink) })
	}
	wg.Wait()
	return time.Since(begun), errors.Join(errs...)
}

// verify compares the pool with what was sent, twice: after the timed transfers and,
// so that no byte can be left over, after one more transfer into zeroed memory.
func (r *receiver) verify(ctx context.Context, rep *Report) error {
	if !r.cfg.Verify {
		return nil
	}
	r.say("comparing every byte")
	check := func() error {
		for _, dest := range r.dests {
			if err := r.pool.check(blocksOf(dest[:r.cfg.blocks(r.cfg.Bytes)])); err != nil {
				return err
			}
		}
		return nil
	}
	if _, err := r.transfer(ctx, r.cfg.Bytes); err != nil { // the bare loop wrote here too
		return err
	}
	if err := check(); err != nil {
		return err
	}
	clear(r.pool.mem)
	if _, err := r.transfer(ctx, r.cfg.Bytes); err != nil {
		return err
	}
	rep.Verified = true
	return check()
}

func blocksOf(dest []kvconn.Dest) []int32 {
	out := make([]int32, len(dest))
	for i, d := range dest {
		out[i] = d.Block
	}
	return out
}
