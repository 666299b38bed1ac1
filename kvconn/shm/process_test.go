//go:build linux

package shm_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/shm"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// processEnv makes the test binary one side that runs until it is killed: a
// "sender", or the address that a receiver is to open.
const processEnv = "XPYD_SHM_TEST_PROCESS"

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// config is a peer's that is patient, but not with silence.
func config(id string) kvconn.Config {
	c := kvconntest.Config(id, 1)
	c.DialTimeout, c.HandshakeTimeout, c.AcceptTimeout, c.TicketTimeout = time.Minute, time.Minute, time.Minute, time.Minute
	return c
}

// childConfig is the other side's, who has nobody to find dead.
func childConfig(id string) kvconn.Config {
	c := config(id)
	c.PeerSilence = time.Minute
	return c
}

// pushAndWait pushes all blocks of all layers but the last one, and computes
// that for ever.
type pushAndWait struct{}

func (pushAndWait) OnTicket(ctx context.Context, o *kvconn.Outgoing) {
	t := o.Ticket()
	if o.Accept(&kvconntest.Source{Layout: kvconntest.Layout(), Seed: kvconntest.Seed(t.Tokens)}) == nil {
		all := make([]int, len(t.Dest))
		for i := range all {
			all[i] = i
		}
		for l := range kvconntest.Layout().Layers() - 1 {
			o.Push(l, all)
		}
	}
	<-ctx.Done()
}

// processMain is one side in a process of its own.
func processMain(what string) error {
	tr, err := shm.New("")
	if err != nil {
		return err
	}
	m, err := kvconn.NewMetrics(nil)
	if err != nil {
		return err
	}
	if what == "sender" {
		srv, err := kvconn.NewServer(childConfig("prefill-0"), quiet, m)
		if err != nil {
			return err
		}
		ln, err := tr.Listen("")
		if err != nil {
			return err
		}
		fmt.Println(ln.Addr())
		return srv.Serve(context.Background(), ln, pushAndWait{})
	}
	cfg := childConfig("decode-0")
	pool := kvconntest.NewPool(kvconntest.Layout(), 256)
	var failed error
	cfg.Shared, err = pool.Share(1, func(size int) (int, []byte) {
		mem, err := memfd.New("xpyd-test", size)
		if err != nil {
			failed = err
			return -1, nil
		}
		return mem.FD, mem.Bytes[:mem.Size]
	})
	if err = errors.Join(failed, err); err != nil {
		return err
	}
	r, err := kvconn.NewReceiver(cfg, tr, quiet, m)
	if err != nil {
		return err
	}
	s, err := r.Open(context.Background(), what, kvconn.PeerID{})
	if err != nil {
		return err
	}
	dest := pool.Dest(0, 200)
	in, err := s.Request(context.Background(), kvconn.TicketSpec{Tokens: kvconntest.Prompt(1, 800), Dest: dest, Sink: pool.Sink(dest), Deadline: time.Now().Add(time.Minute)})
	if err != nil {
		return err
	}
	for in.Stored().Len() < 200 {
		select {
		case <-in.Done():
			return fmt.Errorf("over early")
		case <-time.After(time.Millisecond):
		}
	}
	fmt.Println("placed")
	<-in.Done()
	return nil
}

// start runs the test binary as a side and returns its first line.
func start(t *testing.T, what string) (*exec.Cmd, string) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), processEnv+"="+what)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the other side said nothing: %v", err)
	}
	return cmd, strings.TrimSpace(line)
}

// done is closed when a ticket is over, or when there is none.
func done(in *kvconn.Incoming) <-chan struct{} {
	if in != nil {
		return in.Done()
	}
	none := make(chan struct{})
	close(none)
	return none
}

// eventually waits until ok, at most for limit of the machine's time.
func eventually(t *testing.T, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	clock := kvconntest.NewClock(t)
	for start := clock.Now(); !ok(); time.Sleep(2 * time.Millisecond) {
		if clock.Since(start) > limit {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

func signal(t *testing.T, cmd *exec.Cmd, sig syscall.Signal) {
	t.Helper()
	if err := cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// A sender process that writes into our memory is killed, or stopped, in the
// midst of a ticket. What it had placed and we have verified is right. Our
// blocks are given back when it is gone, when it comes back, and not before.
func TestSenderProcess(t *testing.T) {
	f := func(name string, sig syscall.Signal, then syscall.Signal) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd, addr := start(t, "sender")
			tr, _ := transport(t)
			reg := prometheus.NewPedanticRegistry()
			m, err := kvconn.NewMetrics(reg)
			if err != nil {
				t.Fatal(err)
			}
			cfg := config("decode-0")
			pool := kvconntest.NewPool(kvconntest.Layout(), 256)
			if cfg.Shared, err = pool.Share(1, func(size int) (int, []byte) { return memory(t, size) }); err != nil {
				t.Fatal(err)
			}
			r, err := kvconn.NewReceiver(cfg, tr, quiet, m)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close(t.Context())
			tokens := kvconntest.Prompt(1, 800)
			var in *kvconn.Incoming
			var dest []kvconn.Dest
			for tries := 0; in == nil || in.Stored().Len() <= 20; {
				select {
				case <-done(in): // on a loaded machine it may be silent of itself
					if tries++; tries > 20 {
						t.Fatal("no blocks are placed")
					}
					if in != nil {
						if err := in.Revoke(t.Context()); err != nil {
							t.Fatal(err)
						}
						pool.Reclaim(dest)
					}
					s, err := r.Open(t.Context(), addr, kvconn.PeerID{ID: "prefill-0", Epoch: 1})
					if err != nil {
						t.Fatal(err)
					}
					dest = pool.Dest(0, 200)
					in, err = s.Request(t.Context(), kvconn.TicketSpec{RequestID: name, Tokens: tokens, Dest: dest, Sink: pool.Sink(dest), Deadline: time.Now().Add(time.Minute)})
					if err != nil {
						t.Fatal(err)
					}
				case <-time.After(2 * time.Millisecond):
				}
			}
			signal(t, cmd, sig)
			if _, err := in.Wait(t.Context()); kvconn.OutcomeOf(err, "") != ticket.Dead {
				t.Errorf("want dead, have %v", err)
			}
			if sig == syscall.SIGSTOP {
				// Its connections are closed and it is silent: neither proves
				// that it will not go on writing.
				short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
				defer cancel()
				if err := in.Revoke(short); kvconn.OutcomeOf(err, "") != ticket.Late {
					t.Errorf("revoke of blocks that a stopped peer can write to: %v", err)
				}
				if v := value(t, reg, "xpyd_kvconn_mapped_pools"); v != 1 {
					t.Errorf("%v pools are mapped, want 1", v)
				}
				signal(t, cmd, then)
			}
			began := time.Now()
			if err := in.Revoke(t.Context()); err != nil {
				t.Error(err)
			}
			t.Logf("the fence held after %v", time.Since(began).Round(time.Millisecond))
			stored := in.Stored()
			if err := pool.Check(kvconntest.Seed(tokens), dest, 800, func(layer, index int) bool { return !stored.Has(layer, index) }); err != nil {
				t.Errorf("a torn block was believed: %v", err)
			}
			pool.Reclaim(dest)
			if l := r.Ledger(); len(l) > 0 {
				t.Errorf("ledger: %+v", l)
			}
			eventually(t, 5*time.Second, "no pool is mapped", func() bool { return value(t, reg, "xpyd_kvconn_mapped_pools") == 0 })
			for _, e := range pool.Errors() {
				t.Error(e)
			}
		})
	}
	f("killed", syscall.SIGKILL, 0)
	f("stopped-and-continued", syscall.SIGSTOP, syscall.SIGCONT)
	f("stopped-and-killed", syscall.SIGSTOP, syscall.SIGKILL)
}

// A receiver process is killed, or stopped, while we write into its memory: we
// notice, stop, and unmap it. With the last mapping its memory is gone.
func TestReceiverProcess(t *testing.T) {
	f := func(name string, sig syscall.Signal) {
		t.Run(name, func(t *testing.T) {
			tr, _ := transport(t)
			reg := prometheus.NewPedanticRegistry()
			m, err := kvconn.NewMetrics(reg)
			if err != nil {
				t.Fatal(err)
			}
			srv, err := kvconn.NewServer(config("prefill-0"), quiet, m)
			if err != nil {
				t.Fatal(err)
			}
			ln, err := tr.Listen("")
			if err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- srv.Serve(ctx, ln, pushAndWait{}) }()
			defer func() {
				stop()
				if err := <-done; err != nil {
					t.Error(err)
				}
			}()
			cmd, line := start(t, ln.Addr().String())
			if line != "placed" || !mapped(t) {
				t.Fatalf("receiver says %q, mapped %t", line, mapped(t))
			}
			signal(t, cmd, sig)
			eventually(t, 5*time.Second, "the ticket is over", func() bool { return len(srv.Ledger()) == 0 })
			eventually(t, 5*time.Second, "its pool is unmapped", func() bool {
				return value(t, reg, "xpyd_kvconn_mapped_pools") == 0 && !mapped(t)
			})
		})
	}
	f("killed", syscall.SIGKILL)
	f("stopped", syscall.SIGSTOP)
}

// mapped tells whether this process has a memory file mapped.
func mapped(t *testing.T) bool {
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(b), "memfd:xpyd-test")
}

// value sums a gauge.
func value(t *testing.T, reg *prometheus.Registry, name string) (sum float64) {
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name {
				sum += m.GetGauge().GetValue()
			}
		}
	}
	return sum
}
