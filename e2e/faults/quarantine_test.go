package faults

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn"
)

// TestFaultsQuarantine: a prefill worker that writes into decode's shared
// memory is stopped in the middle of a push. The request is answered by way of
// the other one; the blocks are in quarantine, and show it, for as long as the
// worker is stopped, and no longer.
func TestFaultsQuarantine(t *testing.T) {
	t.Parallel()
	r := cluster.Alone(t, "--config", config(t), "--nats", cluster.StartNATS(t).URL)
	model := mediumModel(t)
	procs := map[string]*cluster.Process{}
	for _, id := range []string{"prefill-0", "prefill-1"} {
		procs[id] = r.Worker(t, fleet.Prefill, "--id", id, "--model", model)
	}
	r.Worker(t, fleet.Decode, "--id", "decode-0", "--model", model)
	r.WaitServing(t, time.Minute, 2, 1)
	client := cluster.NewClient(t)
	send := func(salt string) *cluster.Reply {
		return cluster.Post(t.Context(), client, r.URL+"/v1/completions", longBody(salt))
	}
	right := send("undisturbed")
	if !right.Good() {
		t.Fatal(right)
	}
	if v, err := r.WorkerMetric("decode-0", `xpyd_kvconn_mapped_pools{side="receiver"}`); err != nil || v == 0 {
		t.Fatalf("decode's pool is mapped by %v peers, %v", v, err)
	}

	victim := ""
	for n := 0; victim == ""; n++ {
		if n == 10 {
			t.Fatal("no push was caught half done")
		}
		answer := make(chan *cluster.Reply, 1)
		go func() { answer <- send(fmt.Sprint("broken-", n)) }()
		id := pushing(t, r, answer)
		if id != "" {
			procs[id].Signal(syscall.SIGSTOP)
			victim = id
		}
		got := <-answer
		if !got.Good() || got.Text != right.Text {
			t.Fatalf("%v, want %v", got, right)
		}
		if id != "" && cluster.Poll(5*time.Second, func() error { return quarantined(r, true) }) != nil {
			procs[id].Signal(syscall.SIGCONT) // it had just been through
			victim = ""
		}
	}
	out, stderr, code := r.CLI(t, "status", "--ledger")
	if code != 0 || !strings.Contains(out, "quarantined") || strings.Contains(out, " 0 blocks quarantined") {
		t.Errorf("status --ledger: exit %d, %s\n%s", code, stderr, out)
	}
	cluster.Wait(t, 10*time.Second, "nothing else is held", r.Idle)
	if err := quarantined(r, true); err != nil { // no time frees a block
		t.Error(err)
	}
	procs[victim].Signal(syscall.SIGCONT)
	cluster.Wait(t, 30*time.Second, "the quarantine is over", func() error { return quarantined(r, false) })
	r.WaitServing(t, 30*time.Second, 2, 1) // else its ledger is not asked
	cluster.Wait(t, 10*time.Second, "ledgers empty", r.Idle)
	if out, _, _ := r.CLI(t, "status", "--ledger"); out != "nothing is held\n" {
		t.Errorf("at rest: %q", out)
	}
	if got := send("afterwards"); !got.Good() || got.Text != right.Text {
		t.Errorf("%v, want %v", got, right)
	}
}

// quarantined is nil when there are blocks in quarantine, or none.
func quarantined(r *cluster.Router, want bool) error {
	l, err := r.Ledger()
	if err != nil {
		return err
	}
	if n := l.Quarantined(); (n > 0) != want {
		return fmt.Errorf("%d blocks in quarantine", n)
	}
	return nil
}

// pushing waits for a prefill whose push to decode-0 has begun and lacks much,
// and returns its id; "" when the answer was there first.
func pushing(t *testing.T, r *cluster.Router, answer <-chan *cluster.Reply) (id string) {
	t.Helper()
	cluster.Wait(t, time.Minute, "a push that has begun", func() error {
		l, err := r.Ledger()
		if err != nil || len(answer) > 0 {
			return err
		}
		for _, e := range l.Fleet["decode-0"].Tickets {
			if e.Side == kvconn.SideReceiver && e.State == "accepted" && e.Missing > 0 {
				id = e.Peer.ID
				return nil
			}
		}
		return fmt.Errorf("%+v", l.Fleet["decode-0"].Tickets)
	})
	return id
}

// longBody is a prompt of 2,500 tokens, whose push takes a while.
func longBody(salt string) string {
	ids := make([]string, 2500)
	for i := range ids {
		ids[i] = fmt.Sprint(3 + (i*i+i)%500)
	}
	return fmt.Sprintf(`{"model":"medium","prompt":[%s],"max_tokens":12,"ignore_eos":true,"temperature":0.7,"seed":3,"cache_salt":%q}`,
		strings.Join(ids, ","), salt)
}
