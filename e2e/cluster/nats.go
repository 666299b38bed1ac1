package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// natsEnv is the address on which Main is a NATS server.
const natsEnv = "XPYD_E2E_NATS"

const natsUser, natsPassword = "fleet", "test"

// NATS is an external NATS server in its own process. It keeps its URL when restarted.
type NATS struct {
	*Process
	URL  string
	addr string
}

// StartNATS starts a server on a free port.
func StartNATS(t testing.TB) *NATS {
	t.Helper()
	addr := Port(t)
	n := &NATS{addr: addr, URL: fmt.Sprintf("nats://%s:%s@%s", natsUser, natsPassword, addr)}
	n.Restart(t)
	return n
}

// Restart starts the server again, after Kill.
func (n *NATS) Restart(t testing.TB) {
	t.Helper()
	if n.Process != nil {
		n.Exit(t, 10*time.Second)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	n.Process = StartCommand(t, exec.Command(self, "-test.run=^$"), []string{natsEnv + "=" + n.addr})
	n.Line(t, 20*time.Second, "nats ")
}

// serveNATS is the server's process.
func serveNATS(addr string) int {
	s, err := fleet.StartServer(fleet.ServerConfig{Listen: addr, User: natsUser, Password: natsPassword})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer s.Close()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	fmt.Fprintln(os.Stdout, "nats", addr)
	<-ctx.Done()
	return 0
}
