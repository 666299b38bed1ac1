package worker

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// gpus is a decode worker's choice among the ways to a prefill worker, both on GPUs:
// cudaipc, NCCL, pinned memory, TCP.
type gpus struct {
	*paths
	member fleet.Member
	fail   map[string]error         // by transport
	hangs  map[string]chan struct{} // by transport: opens of it end with that
	dialed []string                 // transports, in order
	said   string
}

func newGPUs(t *testing.T) *gpus {
	t.Helper()
	g := &gpus{fail: map[string]error{}, hangs: map[string]chan struct{}{}, member: fleet.Member{Instance: fleet.Instance{ID: "p", Epoch: 7, KVAddr: "10.0.0.1:9", KVDevice: "cudaipc:x", Machine: "boot/1"}}}
	var err error
	g.paths, err = newPaths(opens(g.dial), transportAuto, transportIPC, "", func() []fleet.Member { return []fleet.Member{g.member} },
		func(s string) { g.said = s }, slog.New(slog.DiscardHandler), prometheus.NewPedanticRegistry())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	g.machine, g.staged = "boot/1", []stagedWay{{transportNCCL, ""}, {transportPinned, ""}}
	return g
}

type opens func(ctx context.Context, addr string) error

func (f opens) Open(ctx context.Context, addr string, _ kvconn.PeerID) (*kvconn.Session, error) {
	return nil, f(ctx, addr)
}

// dial fails as it should.
func (g *gpus) dial(ctx context.Context, addr string) error {
	name := map[string]string{"cudaipc:x": transportIPC, "nccl:10.0.0.1:9": transportNCCL, "pinned:x-pinned": transportPinned, "10.0.0.1:9": transportTCP}[addr]
	if name == "" {
		name = "nowhere:" + addr
	}
	g.dialed = append(g.dialed, name)
	if end := g.hangs[name]; end != nil {
		select {
		case <-end:
		case <-ctx.Done():
			return &kvconn.Error{Phase: kvconn.PhaseDial, Outcome: ticket.Cancelled, Err: ctx.Err()}
		}
	}
	return g.fail[name]
}

func (g *gpus) fetch(t *testing.T) error {
	t.Helper()
	g.dialed = nil
	_, err := g.Open(t.Context(), "10.0.0.1:9", kvconn.PeerID{ID: "p", Epoch: 7})
	return err
}

var (
	refused = &kvconn.Error{Phase: kvconn.PhaseHandshake, Outcome: ticket.Refused, Err: errors.New("no access")}
	mute    = &kvconn.Error{Phase: kvconn.PhaseDial, Outcome: ticket.Dead, Err: errors.New("connection refused")}
	silent  = &kvconn.Error{Phase: kvconn.PhaseHandshake, Outcome: ticket.Late, Err: errors.New("silent")}
)

// TestWays goes through all that can be wrong with each way, and with those behind it:
// the next one is taken, status says why none of the faster ones, each in its turn,
// and the metric why not the fastest.
func TestWays(t *testing.T) {
	type row struct {
		spoil  func(g *gpus)
		dialed string // "": it is not tried
		why    string
		reason string
	}
	near := []row{
		{func(*gpus) {}, "cudaipc", "", ""},
		{func(g *gpus) { g.fail["cudaipc"] = refused }, "cudaipc", "cudaipc: no access", reasonRefused},
		{func(g *gpus) { g.fail["cudaipc"] = mute }, "cudaipc", "cudaipc: connection refused", reasonFailed},
		{func(g *gpus) { g.private = "no IPC here" }, "", "no IPC here", reasonMemory},
		{func(g *gpus) { g.member.KVDevice = "" }, "", "it does not offer cudaipc", reasonPeer},
		{func(g *gpus) { g.member.Machine = "" }, "", "it does not offer cudaipc", reasonPeer},
		{func(g *gpus) { g.member.Machine = "other/1" }, "", "on another machine", reasonMachine},
		{func(g *gpus) { g.member.Machine = "boot/2" }, "", "of another user", reasonUser},
		{func(g *gpus) { g.machine = "" }, "", "on another machine", reasonMachine},
	}
	linked := []row{
		{func(*gpus) {}, "nccl", "", ""},
		{func(g *gpus) { g.fail["nccl"] = refused }, "nccl", "nccl: no access", reasonRefused},
		{func(g *gpus) { g.fail["nccl"] = mute }, "nccl", "nccl: connection refused", reasonFailed},
		{func(g *gpus) { g.staged[0].private = "no libnccl" }, "", "nccl: no libnccl", reasonMemory},
	}
	pinned := []row{
		{func(*gpus) {}, "pinned", "", ""},
		{func(g *gpus) { g.fail["pinned"] = refused }, "pinned", "pinned: no access", reasonRefused},
		{func(g *gpus) { g.fail["pinned"] = mute }, "pinned", "pinned: connection refused", reasonFailed},
		{func(g *gpus) { g.staged[1].private = "cannot pin" }, "", "pinned: cannot pin", reasonMemory},
	}
	for _, a := range near {
		for _, b := range linked {
			for _, c := range pinned {
				g, b, c := newGPUs(t), b, c
				for _, r := range []row{a, b, c} {
					r.spoil(g)
				}
				// What a peer does not announce, or another machine, rules more out.
				if g.member.KVDevice == "" && b.reason != reasonMemory {
					b = row{nil, "", "nccl: it does not offer it", reasonPeer}
				}
				if c.reason != reasonMemory {
					switch {
					case g.member.KVDevice == "":
						c = row{nil, "", "pinned: it does not offer it", reasonPeer}
					case a.reason == reasonMachine, g.member.Machine == "":
						c = row{nil, "", "pinned: on another machine", reasonMachine}
					case a.reason == reasonUser:
						c = row{nil, "", "pinned: of another user", reasonUser}
					}
				}
				var dialed, why []string
				took, reason := transportTCP, a.reason
				for n, r := range []row{a, b, c} {
					if r.dialed != "" {
						dialed = append(dialed, r.dialed)
					}
					if r.reason == "" {
						took = []string{transportIPC, transportNCCL, transportPinned}[n]
						break
					}
					why = append(why, r.why)
				}
				if took == transportTCP {
					dialed = append(dialed, transportTCP)
				}
				said := "p " + took
				if len(why) > 0 {
					said += " (" + strings.Join(why, "; ") + ")"
				}
				if err := g.fetch(t); err != nil || strings.Join(g.dialed, " ") != strings.Join(dialed, " ") || g.said != said {
					t.Errorf("%v, dialed %v, said %q; want %v, %q", err, g.dialed, g.said, dialed, said)
				}
				if n := testutil.ToFloat64(g.gauge.WithLabelValues(took, reason)); n != 1 || testutil.CollectAndCount(g.gauge) != 1 {
					t.Errorf("%s: the metric does not say %s, %q", said, took, reason)
				}
			}
		}
	}
}

// A peer that is in trouble is not asked again by a slower way.
func TestWaysEndAtTrouble(t *testing.T) {
	all := []string{transportIPC, transportNCCL, transportPinned, transportTCP}
	for n, name := range all {
		g := newGPUs(t)
		for _, faster := range all[:n] {
			g.fail[faster] = refused
		}
		g.fail[name] = silent
		if err := g.fetch(t); !errors.Is(err, silent) || len(g.dialed) != n+1 || g.said != "" {
			t.Errorf("%s is silent: %v after %v, said %q", name, err, g.dialed, g.said)
		}
	}
}

// Ways that have failed are left alone, longer each time, also where the fastest is
// ruled out without a try; then all are tried again, beside a request that takes the one
// that works, and the first that works is taken by the next.
func TestWaysAreTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, machine := range []string{"boot/1", "other/1"} {
			g := newGPUs(t)
			g.member.Machine = machine
			g.fail["cudaipc"], g.fail["nccl"], g.fail["pinned"] = refused, refused, mute
			faster := map[string]string{"boot/1": "cudaipc nccl pinned", "other/1": "nccl"}[machine]
			fetch := func(want string) {
				t.Helper()
				err := g.fetch(t)
				synctest.Wait()
				if err != nil || strings.Join(g.dialed, " ") != want {
					t.Errorf("%s: %v, dialed %v, want %s", machine, err, g.dialed, want)
				}
			}
			fetch(faster + " tcp")
			for _, wait := range []time.Duration{pathRetry, 2 * pathRetry, 4 * pathRetry} {
				fetch("tcp")
				time.Sleep(wait - time.Nanosecond)
				fetch("tcp")
				time.Sleep(time.Nanosecond)
				fetch("tcp " + faster)
			}
			clear(g.fail)
			g.fail["cudaipc"] = refused
			time.Sleep(pathRetryMost)
			fetch("tcp " + strings.TrimSuffix(faster, " pinned"))
			fetch("nccl")
			if !strings.HasPrefix(g.said, "p nccl (") {
				t.Errorf("%s: said %q", machine, g.said)
			}
			clear(g.fail)
			time.Sleep(pathRetryMost)
			fetch(map[string]string{"boot/1": "nccl cudaipc", "other/1": "nccl"}[machine])
			if machine == "boot/1" && g.said != "p cudaipc" {
				t.Errorf("%s: said %q", machine, g.said)
			}
		}
	})
}

// A faster way that takes its time to fail again takes no request's: one is tried at a time,
// and what it comes to counts only if no request has found out more.
func TestNoRequestWaitsForAFasterWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGPUs(t)
		g.fail["cudaipc"], g.fail["nccl"] = refused, refused
		fetch := func(want, said string) {
			t.Helper()
			began := time.Now()
			if err := g.fetch(t); err != nil || time.Since(began) > 0 {
				t.Errorf("%v after %v", err, time.Since(began))
			}
			synctest.Wait()
			if strings.Join(g.dialed, " ") != want || g.said != said {
				t.Errorf("dialed %v, said %q; want %s, %q", g.dialed, g.said, want, said)
			}
		}
		const slower = "p pinned (cudaipc: no access; nccl: no access)"
		fetch("cudaipc nccl pinned", slower)
		time.Sleep(pathRetry)
		end := make(chan struct{})
		g.hangs["nccl"] = end
		fetch("pinned cudaipc nccl", slower)
		fetch("pinned", slower)
		g.fail["pinned"] = mute
		const slowest = "p tcp (cudaipc: no access; nccl: no access; pinned: connection refused)"
		fetch("pinned tcp", slowest)
		close(end)
		synctest.Wait()
		if g.said != slowest {
			t.Errorf("said %q, want %q", g.said, slowest)
		}
		g.hangs["nccl"] = make(chan struct{})
		time.Sleep(pathRetryMost)
		fetch("tcp cudaipc nccl", slowest)
		g.Close() // does not wait for what hangs
		fetch("tcp", slowest)
	})
}

// A peer in trouble while a faster way is tried again says nothing of that way: it is left
// alone for longer, and the reason why it was not taken stays.
func TestTroubleBesideARequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGPUs(t)
		g.fail["cudaipc"] = refused
		for _, want := range []string{"cudaipc nccl", "nccl cudaipc"} {
			err := g.fetch(t)
			synctest.Wait()
			if err != nil || strings.Join(g.dialed, " ") != want || g.said != "p nccl (cudaipc: no access)" {
				t.Errorf("%v, dialed %v, said %q; want %s", err, g.dialed, g.said, want)
			}
			g.fail["cudaipc"] = silent
			time.Sleep(pathRetry)
		}
		if err := g.fetch(t); err != nil || len(g.dialed) != 1 {
			t.Errorf("%v, dialed %v", err, g.dialed)
		}
	})
}

// A forced way that does not lead to the peer is one error that says why, and nothing
// slower is taken.
func TestForcedWays(t *testing.T) {
	for _, mode := range []string{transportIPC, transportNCCL, transportPinned} {
		g := newGPUs(t)
		g.mode, g.staged = mode, nil
		if mode != transportIPC {
			g.staged = []stagedWay{{mode, ""}}
		}
		if err := g.fetch(t); err != nil || len(g.dialed) != 1 || g.dialed[0] != mode {
			t.Errorf("%s: %v, dialed %v", mode, err, g.dialed)
		}
		g.fail[mode] = refused
		if err := g.fetch(t); kvconn.OutcomeOf(err, "") != ticket.Incompatible || !strings.Contains(err.Error(), mode+": no access") || len(g.dialed) != 1 {
			t.Errorf("%s is refused: %v, dialed %v", mode, err, g.dialed)
		}
	}
}
