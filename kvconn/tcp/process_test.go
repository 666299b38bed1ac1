//go:build linux

package tcp_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// senderEnv makes the test binary a sender that serves until it is killed.
const senderEnv = "XPYD_KVCONN_TEST_SENDER"

// half accepts every ticket, pushes the first layer and computes for ever.
type half struct{}

func (half) OnTicket(ctx context.Context, o *kvconn.Outgoing) {
	if o.Accept(&kvconntest.Source{Layout: kvconntest.Layout()}) == nil {
		o.Push(0, []int{0, 1})
	}
	<-ctx.Done()
}

func serveUntilKilled() error {
	tr := tcp.New(nil)
	m, err := kvconn.NewMetrics(nil)
	if err != nil {
		return err
	}
	cfg := kvconntest.Config("prefill-0", 1)
	cfg.HandshakeTimeout = time.Minute
	srv, err := kvconn.NewServer(cfg, slog.New(slog.NewTextHandler(io.Discard, nil)), m)
	if err != nil {
		return err
	}
	ln, err := tr.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	return srv.Serve(context.Background(), ln, half{})
}

// A real process that is killed is known at once; one that is stopped, within
// PeerSilence. Either way the receiver holds nothing afterwards.
func TestProcess(t *testing.T) {
	f := func(name string, sig syscall.Signal, limit time.Duration) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), senderEnv+"=1")
			out, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				cmd.Process.Kill()
				cmd.Wait()
			}()
			addr, err := bufio.NewReader(out).ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			tr := tcp.New(nil)
			m, err := kvconn.NewMetrics(nil)
			if err != nil {
				t.Fatal(err)
			}
			cfg := kvconntest.Config("decode-0", 1)
			cfg.DialTimeout, cfg.HandshakeTimeout, cfg.AcceptTimeout = time.Minute, time.Minute, time.Minute
			r, err := kvconn.NewReceiver(cfg, tr, slog.New(slog.NewTextHandler(io.Discard, nil)), m)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close(t.Context())
			s, err := r.Open(t.Context(), strings.TrimSpace(addr), kvconn.PeerID{ID: "prefill-0", Epoch: 1})
			if err != nil {
				t.Fatal(err)
			}
			pool := kvconntest.NewPool(kvconntest.Layout(), 8)
			dest := pool.Dest(0, 2)
			in, err := s.Request(t.Context(), kvconn.TicketSpec{RequestID: name, Tokens: kvconntest.Prompt(1, 8), Dest: dest, Sink: pool.Sink(dest),
				Deadline: time.Now().Add(time.Minute)})
			if err != nil {
				t.Fatal(err)
			}
			clock := kvconntest.NewClock(t)
			for start := clock.Now(); in.Stored().Len() < 2; time.Sleep(5 * time.Millisecond) {
				if clock.Since(start) > 5*time.Second {
					t.Fatal("nothing came")
				}
			}
			start := clock.Now()
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			_, err = in.Wait(t.Context())
			took := clock.Since(start)
			if kvconn.OutcomeOf(err, "") != ticket.Dead {
				t.Errorf("want dead, have %v", err)
			}
			if took > limit {
				t.Errorf("known after %v, want at most %v", took, limit)
			}
			if err := in.Revoke(t.Context()); err != nil {
				t.Error(err)
			}
			if l := r.Ledger(); len(l) > 0 {
				t.Errorf("ledger: %+v", l)
			}
			t.Logf("known after %v: %v", took.Round(time.Millisecond), err)
		})
	}
	silence := kvconn.DefaultConfig().PeerSilence
	f("killed", syscall.SIGKILL, silence/2)
	f("stopped", syscall.SIGSTOP, silence+silence/2)
}
