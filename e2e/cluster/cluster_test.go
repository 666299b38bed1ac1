package cluster_test

import (
	"os"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

func TestMain(m *testing.M) { os.Exit(cluster.Main(m)) }

// TestCluster: what the package offers, in one walk: a front door on an
// external NATS, two workers that join with one flag, a stream, the counts.
func TestCluster(t *testing.T) {
	nats := cluster.StartNATS(t)
	r := cluster.Alone(t, "--nats", nats.URL)
	r.Worker(t, fleet.Prefill, "--id", "p")
	r.Worker(t, fleet.Decode, "--id", "d")
	r.WaitServing(t, 20*time.Second, 1, 1)
	if err := r.Ready(); err != nil {
		t.Error(err)
	}
	client := cluster.NewClient(t)
	for _, stream := range []string{"true", "false"} {
		a := cluster.Post(t.Context(), client, r.URL+"/v1/completions",
			`{"model":"stories260k","prompt":"Once upon a time","max_tokens":8,"temperature":0,"stream":`+stream+`}`)
		if !a.Good() || a.Prefill != "p" || a.Decode != "d" || a.Text != ", there was a little girl" || a.Finish != "length" {
			t.Errorf("stream %s: %v, %q", stream, a, a.Text)
		}
	}
	cluster.Wait(t, time.Second, "ledgers empty", r.Idle)
	counts, err := r.Counts()
	if err != nil || len(counts) != 3 || counts["router"].FDs == 0 || counts["router"].Goroutines == 0 {
		t.Errorf("counts %v, %v", counts, err)
	}
	nats.Kill()
	nats.Restart(t)
	out, _, code := r.CLI(t, "status")
	if code != 0 {
		t.Errorf("status: %d %s", code, out)
	}
}
