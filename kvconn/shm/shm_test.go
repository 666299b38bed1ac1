//go:build linux

package shm_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/shm"
)

func TestMain(m *testing.M) {
	if what := os.Getenv(processEnv); what != "" {
		if err := processMain(what); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	kvconntest.Main(m, shared, 48)
}

func transport(t testing.TB) (kvconn.Transport, string) {
	tr, err := shm.New("")
	if err != nil {
		t.Fatal(err)
	}
	return tr, ""
}

func memory(t testing.TB, size int) (fd int, mem []byte) {
	m, err := memfd.New("xpyd-test", size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m.FD, m.Bytes[:m.Size]
}

// shared are the worlds of real processes.
var shared = kvconntest.Factory{New: transport, Memory: memory, Shrink: 2}

// TestProcesses kills and stops real processes at every step.
func TestProcesses(t *testing.T) {
	t.Parallel()
	kvconntest.Processes(t, shared)
}

// TestShared is the suite with rows that the sender places.
func TestShared(t *testing.T) {
	kvconntest.Run(t, kvconntest.Factory{New: transport, Memory: memory, Shrink: 2, AtOnce: 48})
}

// TestSharedRanks is the suite with unequal numbers of ranks, where some heads are kept by more
// than one of the receiver's.
func TestSharedRanks(t *testing.T) {
	for _, ranks := range [][2]int{{1, 2}, {2, 4}, {4, 1}} {
		t.Run(fmt.Sprintf("%d to %d", ranks[0], ranks[1]), func(t *testing.T) {
			kvconntest.Run(t, kvconntest.Factory{New: transport, Memory: memory, SenderRanks: ranks[0], Ranks: ranks[1], Shrink: 2, AtOnce: 48})
		})
	}
}

// TestSockets is the suite with a receiver that has no memory to share: rows go
// over the sockets.
func TestSockets(t *testing.T) {
	kvconntest.Run(t, kvconntest.Factory{New: transport, Shrink: 2, AtOnce: 48})
}
