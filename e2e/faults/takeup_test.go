package faults

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn"
)

// TestFaultsTakeUp: a prefill is killed in the middle of a push. The request
// is answered all the same, decode keeps what has arrived, and the second
// prefill sends the rest only.
func TestFaultsTakeUp(t *testing.T) {
	t.Parallel()
	r := cluster.Alone(t, "--config", config(t), "--nats", cluster.StartNATS(t).URL)
	model := mediumModel(t)
	procs := map[string]*cluster.Process{}
	patient := filepath.Join(t.TempDir(), "worker.yaml") // a killed peer shows by its end, and a starved one is none
	if err := os.WriteFile(patient, []byte("kv: {peer_silence: 30s, handshake_timeout: 30s, dial_timeout: 30s}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	start := func(role fleet.Role, id string) {
		procs[id] = r.Worker(t, role, "--id", id, "--model", model, "--config", patient)
	}
	start(fleet.Prefill, "prefill-0")
	start(fleet.Prefill, "prefill-1")
	start(fleet.Decode, "decode-0")
	r.WaitServing(t, time.Minute, 2, 1)
	client := cluster.NewClient(t)
	moved := func() (units, resumed float64) {
		t.Helper()
		of := func(name string) float64 {
			v, err := r.WorkerMetric("decode-0", name)
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
		return of(`xpyd_kvconn_units_total{side="receiver"}`), of("xpyd_kv_resumed_units_total")
	}
	before, _ := moved()
	right := cluster.Post(t.Context(), client, r.URL+"/v1/completions", longBody("undisturbed"))
	if !right.Good() {
		t.Fatal(right)
	}
	after, _ := moved()
	whole := after - before // units of such a prompt

	before, _ = moved()
	answer := make(chan *cluster.Reply, 1)
	go func() { answer <- cluster.Post(t.Context(), client, r.URL+"/v1/completions", longBody("broken")) }()
	victim := ""
	cluster.Wait(t, time.Minute, "a push that is half done", func() error {
		l, err := r.Ledger()
		if err != nil {
			return err
		}
		for _, e := range l.Fleet["decode-0"].Tickets {
			if now, _ := moved(); e.Side == kvconn.SideReceiver && now-before > whole/4 && e.Missing > 0 {
				victim = e.Peer.ID
				return nil
			}
		}
		return fmt.Errorf("%+v", l.Fleet["decode-0"].Tickets)
	})
	var held struct {
		Lines []struct {
			Process, Kind, State, Peer, Why string
			Age                             float64 `json:"age_s"`
			Blocks, Missing                 int
		}
	}
	out, stderr, code := r.CLI(t, "status", "--ledger", "--json")
	if err := json.Unmarshal([]byte(out), &held); err != nil || code != 0 {
		t.Fatalf("status --ledger: %v, exit %d, %s\n%s", err, code, stderr, out)
	}
	seen := map[string]bool{}
	for n, l := range held.Lines {
		seen[l.Process+" "+l.Kind+" "+l.State] = true
		if l.Why == "" || n > 0 && l.Age > held.Lines[n-1].Age {
			t.Errorf("line %d: %+v", n, l)
		}
	}
	for _, want := range []string{"router request", "decode-0 request", "decode-0 ticket accepted", "decode-0 blocks receiving", victim + " ticket accepted"} {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(seen)), func(k string) bool { return strings.HasPrefix(k, want) }) {
			t.Errorf("no line %q in\n%s", want, out)
		}
	}
	procs[victim].Kill()
	got := <-answer
	if !got.Good() || got.Text != right.Text {
		t.Fatalf("%v, want %v", got, right)
	}
	now, resumed := moved()
	t.Logf("%s killed; %v units of a prompt, %v moved over both attempts, %v taken up", victim, whole, now-before, resumed)
	if now-before != whole {
		t.Errorf("%v units were stored, want each of %v once", now-before, whole)
	}
	if resumed < whole/4 {
		t.Errorf("%v units were taken up, at least %v had arrived", resumed, whole/4)
	}
	cluster.Wait(t, afterKnown+slack, "ledgers empty", r.Idle)
	if out, _, _ := r.CLI(t, "status", "--ledger"); out != "nothing is held\n" {
		t.Errorf("at rest: %q", out)
	}
}
