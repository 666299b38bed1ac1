package tcp_test

import (
	"testing"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/tcp"
)

func TestTCP(t *testing.T) {
	kvconntest.Run(t, kvconntest.Factory{
		New: func(t testing.TB) (kvconn.Transport, string) {
			tr, err := tcp.New(tcp.DefaultConfig())
			if err != nil {
				t.Fatal(err)
			}
			return tr, "127.0.0.1:0"
		},
		Shrink: 10,
	})
}
