package flight

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/limit"
)

// TestTenantLabels: the label tenant has a bounded number of values.
func TestTenantLabels(t *testing.T) {
	s := newStatsByName()
	for i := range 10 * maxTenants {
		s.of(fmt.Sprint(i)).limited("queue")
	}
	if len(s.all) != maxTenants+1 || s.of("5").name != "5" || s.of("x").name != otherTenants {
		t.Errorf("%d", len(s.all))
	}
}

// TestShedErrors: each reason has its status, and Retry-After is what was
// measured.
func TestShedErrors(t *testing.T) {
	f := func(why limit.Why, status, after int) {
		t.Helper()
		e := shedError(&limit.Refusal{Why: why, After: 2500 * time.Millisecond, Limits: limit.Limits{Wait: time.Second}})
		if e.Status != status || e.RetryAfter != after {
			t.Errorf("%s: %d %d", why, e.Status, e.RetryAfter)
		}
	}
	f(limit.Full, 429, 3)
	f(limit.Displaced, 429, 3)
	f(limit.Late, 503, 3)
	f(limit.Hopeless, 503, 3)
	f(limit.Deadline, 504, 0)
	if seconds(0) != 1 || seconds(1) != 1 || seconds(time.Minute) != 60 {
		t.Error("seconds")
	}
}

// TestTally: the usage that a stream reports counts; without one, its events do.
func TestTally(t *testing.T) {
	var u usage
	u.tally([]byte("data: {\"a\":1}\n\ndata: {\"b\":1}\n\n"), 2)
	if u.events != 2 || u.told {
		t.Errorf("%+v", u)
	}
	u.tally([]byte("data: {\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n"), 1)
	if !u.told || u.prompt != 5 || u.generated != 2 {
		t.Errorf("%+v", u)
	}
	u = usage{}
	u.tally([]byte(`{"usage":{"prompt_tokens":5}}`), 0)
	if !u.told || u.prompt != 5 {
		t.Errorf("%+v", u)
	}
	u.tell(math.MaxInt64, math.MaxInt64)
	if u.prompt != maxTold || u.generated != maxTold {
		t.Errorf("%+v", u)
	}
}

// TestWrongUsage: whatever an engine says, a request counts for no more than
// was asked for, or than fits into the context or into what was sent.
func TestWrongUsage(t *testing.T) {
	f := func(path, body string, context int, prompt, completion uint64, want int) {
		t.Helper()
		q := &request{summary: summary{path: path, status: 200}, forwarded: path != "/v1/completions", body: []byte(body), tenant: &tenant{}, adm: &admission{}}
		var err *openai.Error
		if q.top, err = openai.Scan(q.body); err != nil {
			t.Fatal(err)
		}
		q.estimate(&q.top)
		q.attempts = []*attempt{{d: newLeg(fleet.Decode, &fleet.Instance{MaxModelLen: context}, 1)}}
		said := fmt.Sprintf(`{"usage":{"prompt_tokens":%d,"completion_tokens":%d}}`, prompt, completion)
		q.bytes = int64(len(said))
		q.usage.tally([]byte(said), 0)
		if n, generated := q.used(); n != want || generated > want {
			t.Errorf("%s: %d tokens, want %d", body, n, want)
		}
	}
	const limited, free, many = `{"prompt":"x","max_tokens":8,"n":2}`, `{"prompt":"x"}`, `{"prompt":["x","y"],"n":3}`
	f("/v1/completions", limited, 512, 5, 7, 12)
	for _, wrong := range []uint64{math.MaxUint32, math.MaxInt64} {
		f("/v1/completions", limited, 512, 5, wrong, 5+2*8)
		f("/v1/completions", limited, 0, wrong, wrong, len(limited)+unseen+2*8)
		f("/v1/completions", free, 512, wrong, wrong, 512+512)
		f("/v1/completions", many, 512, wrong, wrong, 2*512+6*512)
		f("/v1/embeddings", `{"input":"x"}`, 512, wrong, 0, len(`{"input":"x"}`)+unseen)
	}
}

// TestFactsAreForgotten: with the engine that told them.
func TestFactsAreForgotten(t *testing.T) {
	k := facts{byID: map[string]known{}}
	var members []fleet.Member
	for _, id := range []string{"here", "gone", "restarted", "removed"} {
		m := fleet.Member{Instance: fleet.Instance{ID: id, Epoch: 1}, State: fleet.Live}
		k.put(&m.Instance, dialect.Facts{})
		switch id {
		case "gone":
			m.State = fleet.Gone
		case "restarted":
			m.Epoch = 2
		case "removed":
			continue
		}
		members = append(members, m)
	}
	k.prune(fleet.NewSnapshot(1, time.Time{}, members))
	for id, want := range map[string]bool{"here": true, "gone": false} {
		for epoch := range uint64(3) {
			if _, ok := k.get(&fleet.Instance{ID: id, Epoch: epoch}); ok != (want && epoch == 1) {
				t.Errorf("%s, epoch %d: known %t", id, epoch, ok)
			}
		}
	}
	if len(k.byID) != 1 {
		t.Errorf("%v", k.byID)
	}
}

// TestAdmitCostsNothing: without keys and with places free, admission
// allocates nothing but what ends it.
func TestAdmitCostsNothing(t *testing.T) {
	g := newGate(DefaultPolicy().Limits)
	if n := testing.AllocsPerRun(100, func() {
		if !g.TryEnter() {
			t.Fatal("no place")
		}
		g.Leave(time.Time{}, true)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	k := &keyring{}
	if n := testing.AllocsPerRun(100, func() {
		if _, ok := k.identify(nil); !ok {
			t.Fatal("refused")
		}
		if hosts(nil).check("messages") != nil {
			t.Fatal("refused")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
