//go:build linux

package tcp_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/tcp"
)

func TestMain(m *testing.M) {
	if os.Getenv(senderEnv) != "" {
		if err := serveUntilKilled(); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(benchEnv) != "" {
		fmt.Fprintln(os.Stderr, serveBench())
		os.Exit(1)
	}
	kvconntest.Main(m, peers, 64)
}

func TestTCP(t *testing.T)      { suite(t, false) }
func TestTCPRelay(t *testing.T) { suite(t, true) }

// TestTCPRanks is the suite between a sender and a receiver of several ranks.
func TestTCPRanks(t *testing.T) {
	kvconntest.Run(t, kvconntest.Factory{
		New:         func(t testing.TB) (kvconn.Transport, string) { return tcp.New(nil), "127.0.0.1:0" },
		SenderRanks: 2, Ranks: 4, Shrink: 2, AtOnce: 48,
	})
}

func suite(t *testing.T, relay bool) {
	kvconntest.Run(t, kvconntest.Factory{
		Relay: relay,
		New: func(t testing.TB) (kvconn.Transport, string) {
			return tcp.New(nil), "127.0.0.1:0"
		},
		Shrink: 2, AtOnce: 48,
	})
}
