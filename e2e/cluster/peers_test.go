package cluster_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// TestPeers: a worker that takes no new work still gives its KV. The router knows it from events
// and names it to the chosen pair, which fetches the prefix. If that worker is stopped, killed or
// restarted meanwhile, the pair computes; the answer is the same.
func TestPeers(t *testing.T) {
	for _, bring := range []string{"off", "on"} {
		t.Run("bring "+bring, func(t *testing.T) { testPeers(t, bring) })
	}
}

func testPeers(t *testing.T, bring string) {
	config := filepath.Join(t.TempDir(), "router.yaml")
	if err := os.WriteFile(config, []byte("fleet: {listen: \"127.0.0.1:0\"}\npick: {policy: kv_events}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := cluster.Alone(t, "--config", config)
	const loadTimeout = 3 * time.Second // for a starved machine; a hung peer costs as much
	begin := func(role fleet.Role, id string) *cluster.Process {
		return cluster.Start(t, []string{"XPYD_KV__LOAD_TIMEOUT=" + loadTimeout.String(), "XPYD_KV__PEER_BRING=" + bring}, string(role), "--join-file", r.Join, "--threads", "1", "--id", id)
	}
	begin(fleet.Prefill, "p")
	begin(fleet.Decode, "d")
	giver := begin(fleet.Decode, "giver")
	r.WaitServing(t, time.Minute, 1, 2)
	client := cluster.NewClient(t)
	where := func(id string) *cluster.Instance {
		f, err := r.Fleet()
		if err != nil || f.Get(id) == nil {
			t.Fatalf("%s: %+v %v", id, f, err)
		}
		return f.Get(id)
	}
	drain := func() {
		t.Helper()
		if out, stderr, code := r.CLI(t, "drain", "giver"); code != 0 {
			t.Fatal(out, stderr)
		}
		cluster.Wait(t, 20*time.Second, "the giver takes nothing", func() error { return r.ServingIs(1, 1) })
	}
	drain()
	prompt := func(n int32) []int32 {
		ids := []int32{1}
		for i := range int32(200) {
			ids = append(ids, 300+(i*n)%200)
		}
		return ids
	}
	// warm makes the giver compute a prompt directly, and waits until the router knows.
	warm := func(n int32) *told {
		t.Helper()
		before, err := r.Metric("xpyd_router_kv_index_blocks")
		if err != nil {
			t.Fatal(err)
		}
		a := say(t, r.AsMember(t, where("giver")), where("giver").URL, prompt(n), "")
		cluster.Wait(t, 20*time.Second, "the router knows", func() error {
			now, err := r.Metric("xpyd_router_kv_index_blocks")
			if err == nil && now < before+12 {
				err = fmt.Errorf("%v blocks, %v before", now, before)
			}
			return err
		})
		return a
	}
	ask := func(n int32, want *told) (cached int) {
		t.Helper()
		began := time.Now()
		got := say(t, client, r.URL, prompt(n), "")
		if !reflect.DeepEqual(got.Choices, want.Choices) {
			t.Errorf("prompt %d:\n got %+v\nwant %+v", n, got, want)
		}
		if took := time.Since(began); cluster.Late(took, loadTimeout+20*time.Second) {
			t.Errorf("prompt %d took %v", n, took)
		}
		cluster.Wait(t, 10*time.Second, "ledgers empty", func() error { return idle(t, r, "p", "d") })
		return got.Usage.Prompts.Cached
	}
	if cached := ask(1, warm(1)); cached < 192 {
		t.Errorf("%d tokens cached", cached)
	}

	want := warm(3)
	giver.Signal(syscall.SIGSTOP)
	ask(3, want)
	failed, err := r.WorkerMetric("p", `xpyd_kvtier_peer_fetches_total{result="failed"}`)
	t.Log("fetches that failed with the giver stopped:", failed, err)            // none if the fleet suspected it before
	ask(5, say(t, r.AsMember(t, where("p")), where("p").URL, prompt(5), "cold")) // the next one pays nothing, and goes on
	giver.Signal(syscall.SIGCONT)
	cluster.Wait(t, 30*time.Second, "the giver is back", func() error {
		f, err := r.Fleet()
		if err == nil && f.Get("giver").State != fleet.Live {
			err = fmt.Errorf("it is %s", f.Get("giver").State)
		}
		return err
	})

	want = warm(7)
	giver.Kill()
	ask(7, want)
	<-giver.Done()

	begin(fleet.Decode, "giver") // another run: what the first one had is forgotten
	cluster.Wait(t, 30*time.Second, "it joins", func() error { return r.ServingIs(1, 2) })
	drain()
	ask(9, warm(9))
	cluster.Wait(t, 10*time.Second, "ledgers empty", r.Idle)
	if n, err := r.WorkerMetric("p", `xpyd_kvtier_peer_fetches_total{result="done"}`); err != nil || n < 1 {
		t.Errorf("%v fetches, %v", n, err)
	}
}

// idle is nil when these workers hold nothing. It does not ask others, which may be stopped.
func idle(t *testing.T, r *cluster.Router, ids ...string) error {
	f, err := r.Fleet()
	if err != nil {
		return err
	}
	for _, id := range ids {
		resp, err := r.AsMember(t, f.Get(id)).Get(f.Get(id).URL + "/debug/ledger")
		if err != nil {
			return err
		}
		var l struct {
			Requests, Tickets, Held []any
			Blocks                  []struct{ State string }
		}
		err = json.NewDecoder(resp.Body).Decode(&l)
		resp.Body.Close()
		if err != nil {
			return err
		}
		n := len(l.Requests) + len(l.Held)
		for _, b := range l.Blocks {
			if b.State != "quarantined" {
				n++
			}
		}
		if n > 0 {
			return fmt.Errorf("%s holds %+v", id, l)
		}
	}
	return nil
}
