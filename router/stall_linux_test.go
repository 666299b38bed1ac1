package router_test

import (
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
)

// queued sums what the kernel holds for this host's TCP sockets that match:
// bytes to be sent, and received bytes that were not read.
func queued(t *testing.T, match func(local, remote int) bool) (tx, rx int) {
	t.Helper()
	table, err := os.ReadFile("/proc/self/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	port := func(addr string) int {
		_, hex, _ := strings.Cut(addr, ":")
		n, _ := strconv.ParseInt(hex, 16, 32)
		return int(n)
	}
	for _, line := range strings.Split(string(table), "\n")[1:] {
		if f := strings.Fields(line); len(f) > 4 && match(port(f[1]), port(f[2])) {
			a, b, _ := strings.Cut(f[4], ":")
			x, _ := strconv.ParseInt(a, 16, 64)
			y, _ := strconv.ParseInt(b, 16, 64)
			tx, rx = tx+int(x), rx+int(y)
		}
	}
	return tx, rx
}

// TestStalledClient: what the router and the kernel hold for a client that does
// not read its stream is at most 256 KiB.
func TestStalledClient(t *testing.T) {
	g := newRig(t, 1, 1)
	d := g.workers["d0"]
	var sent atomic.Int64
	d.on(&d.decode, flood("data: "+strings.Repeat("x", 1000)+"\n\n", &sent))
	conn := g.dial()
	defer conn.Close()
	if err := conn.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	sendRaw(t, conn, askStream)
	last, same := int64(-1), 0
	g.until("everything to be full", func() bool {
		if n := sent.Load(); n != last || n == 0 {
			last, same = n, 0
		}
		same++
		return same > 100
	})
	front := g.r.Addr().(*net.TCPAddr).Port
	engine := d.srv.Listener.Addr().(*net.TCPAddr).Port
	tx, _ := queued(t, func(local, remote int) bool { return local == front && remote == conn.LocalAddr().(*net.TCPAddr).Port })
	_, rx := queued(t, func(_, remote int) bool { return remote == engine })
	t.Logf("%d KiB to be sent, %d KiB to be read", tx>>10, rx>>10)
	if held := tx + rx + 2*16<<10; held > 256<<10 { // and a run on its way, in two buffers
		t.Errorf("%d KiB to be sent, %d KiB to be read", tx>>10, rx>>10)
	}
}
