package faults

import (
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// crowd opens idle connections to a port; what they are told is not read.
func crowd(t *testing.T, addr string) (leave func()) {
	t.Helper()
	var all []net.Conn
	for range 300 {
		c, err := net.DialTimeout("tcp", addr, 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	leave = func() {
		for _, c := range all {
			c.Close()
		}
	}
	t.Cleanup(leave)
	return leave
}

// TestFewFiles: with 128 files a process, 300 idle connections to any of the
// ports keep nobody from the others; no process ends, no worker is thought dead,
// and once they are closed everything is as before.
func TestFewFiles(t *testing.T) {
	t.Parallel()
	r := cluster.UpWithFiles(t, 128)
	before, err := r.Fleet()
	if err != nil {
		t.Fatal(err)
	}
	answers := func() error {
		client := cluster.NewClient(t)
		defer client.CloseIdleConnections()
		a := cluster.Post(t.Context(), client, r.URL+"/v1/completions", `{"model":"stories260k","prompt":"Once","max_tokens":4,"temperature":0}`)
		if !a.Good() {
			return fmt.Errorf("%v", a)
		}
		return nil
	}
	asBefore := func(when string) {
		t.Helper()
		cluster.Wait(t, 30*time.Second, when+": an answer", answers)
		now, err := r.Fleet()
		if err != nil {
			t.Fatalf("%s: the admin port: %v", when, err)
		}
		for i := range before.Instances {
			was := &before.Instances[i]
			if is := now.Get(was.ID); is == nil || is.Epoch != was.Epoch || is.State != fleet.Live || !is.Probed {
				t.Errorf("%s: %s is %+v", when, was.ID, is)
			}
		}
	}
	host := func(url string) string { return strings.TrimPrefix(url, "http://") }

	leave := crowd(t, host(r.URL))
	if _, err := r.Fleet(); err != nil {
		t.Errorf("the admin port, while the public one is crowded: %v", err)
	}
	leave()
	asBefore("after a crowd at the public port")

	leave = crowd(t, host(r.Admin))
	if err := answers(); err != nil {
		t.Errorf("the public port, while the admin port is crowded: %v", err)
	}
	leave()
	cluster.Wait(t, 30*time.Second, "the admin port", func() error { _, err := r.Fleet(); return err })
	asBefore("after a crowd at the admin port")

	for i := range before.Instances {
		w := &before.Instances[i]
		kv, events, all := crowd(t, w.KVAddr), crowd(t, host(w.KVEvents)), crowd(t, host(w.URL))
		kv()
		events()
		all()
		asBefore("after a crowd at " + w.ID)
	}
}

// TestBusyWithFewFiles: with 64 files a process, each request that the router takes at once gets
// its legs to a pair; the others are refused at the door.
func TestBusyWithFewFiles(t *testing.T) {
	t.Parallel()
	r := cluster.UpWithFiles(t, 64)
	var good atomic.Int64
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			client := cluster.NewClient(t)
			defer client.CloseIdleConnections()
			a := cluster.Post(t.Context(), client, r.URL+"/v1/completions", `{"model":"stories260k","prompt":"Once","max_tokens":400,"ignore_eos":true,"stream":true}`)
			switch {
			case a.Good():
				good.Add(1)
			case a.Status != 0 && !strings.Contains(a.Problem, "has its"): // 0: refused while it was being sent
				t.Error(a)
			}
		})
	}
	wg.Wait()
	if n := good.Load(); n < 4 {
		t.Errorf("%d answers", n)
	}
}
