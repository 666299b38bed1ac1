package kvconntest_test

import (
	"testing"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
)

func TestMemory(t *testing.T) {
	kvconntest.Run(t, kvconntest.Factory{
		New:    func(testing.TB) (kvconn.Transport, string) { return kvconntest.NewMemory(64 << 10), "" },
		Bubble: true,
	})
}

// A pipe shorter than a frame makes every write and read a partial one.
func TestMemoryTightPipe(t *testing.T) {
	kvconntest.Run(t, kvconntest.Factory{
		New:    func(testing.TB) (kvconn.Transport, string) { return kvconntest.NewMemory(37), "" },
		Bubble: true,
	})
}
