//go:build linux

package tcp_test

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/tcp"
)

// TestMain lets more cases run at once than there are cores: the suite's cases
// wait for deadlines, they do not compute.
func TestMain(m *testing.M) {
	if kvconntest.Child(peers) {
		return
	}
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
	flag.Parse()
	flag.Set("test.parallel", "64")
	os.Exit(m.Run())
}

func TestTCP(t *testing.T)      { suite(t, false) }
func TestTCPRelay(t *testing.T) { suite(t, true) }

func suite(t *testing.T, relay bool) {
	kvconntest.Run(t, kvconntest.Factory{
		Relay: relay,
		New: func(t testing.TB) (kvconn.Transport, string) {
			tr, err := tcp.New(tcp.DefaultConfig())
			if err != nil {
				t.Fatal(err)
			}
			return tr, "127.0.0.1:0"
		},
		Shrink: 2,
	})
}
