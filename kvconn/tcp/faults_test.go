//go:build linux

package tcp_test

import (
	"testing"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/tcp"
)

// peers are the worlds of real processes.
var peers = kvconntest.Factory{
	New: func(t testing.TB) (kvconn.Transport, string) {
		tr, err := tcp.New(tcp.DefaultConfig())
		if err != nil {
			t.Fatal(err)
		}
		return tr, "127.0.0.1:0"
	},
	Shrink: 2,
}

// TestProcesses kills and stops real processes at every step.
func TestProcesses(t *testing.T) { kvconntest.Processes(t, peers) }
