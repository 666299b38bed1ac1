//go:build linux

package tcp_test

import (
	"cmp"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/tcp"
)

// peers are the worlds of real processes.
var peers = kvconntest.Factory{
	New: func(t testing.TB) (kvconn.Transport, string) {
		return tcp.New(nil), "127.0.0.1:0"
	},
	Shrink: 2,
}

// TestProcesses kills and stops real processes at every step.
func TestProcesses(t *testing.T) {
	t.Parallel()
	kvconntest.Processes(t, peers)
}

// TestLossy runs over a network with delay, loss and partitions.
// XPYD_FAULT_ROUNDS is how many of the latter; more than one last 5 s each.
func TestLossy(t *testing.T) {
	t.Parallel()
	rounds, err := strconv.Atoi(cmp.Or(os.Getenv("XPYD_FAULT_ROUNDS"), "1"))
	if err != nil {
		t.Fatal(err)
	}
	partition := 2 * time.Second
	if rounds > 1 {
		partition = 5 * time.Second
	}
	kvconntest.Lossy(t, min(rounds, 10), partition)
}
