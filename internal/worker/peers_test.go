package worker_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/worker"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// turn is the body of one turn of a conversation that has come so far.
func turn(tokens []int32, most int, more string) string {
	ids, _ := json.Marshal(tokens)
	return fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"temperature":0.8,"seed":5,"ignore_eos":true,"return_token_ids":true%s}`, ids, most, more)
}

// through sends a body through a pair, as our router does.
func through(t *testing.T, p, d *worker.Worker, more map[string]string, body string) *answer {
	t.Helper()
	link := ticket.NewLink().String()
	done := leg(t, p, link)
	header := linked(p, link)
	for k, v := range more {
		header[k] = v
	}
	a := complete(t, d, header, body)
	if got := <-done; !strings.HasPrefix(got, "200 ") || !strings.Contains(got, `"outcome":"done"`) {
		t.Fatal(got)
	}
	return a
}

// peerHeader names a worker that has so many tokens of a prompt.
func peerHeader(w *worker.Worker, tokens int) map[string]string {
	i := w.Instance()
	return map[string]string{"x-xpyd-kv-peer": fmt.Sprintf("%s %d %s %s %d", i.ID, i.Epoch, i.URL, i.KVAddr, tokens)}
}

// patient is for tests that are not about time: on a starved machine a fetch
// may take long, and must not be given up.
func patient(list ...*worker.Config) {
	for _, c := range list {
		c.KV.LoadTimeout = time.Minute
	}
}

// TestTurns: what decode has computed of turn n, its answer, prefill fetches
// for turn n+1; the tokens are those of one worker that computes everything.
func TestTurns(t *testing.T) {
	plain := start(t, nil)
	for _, sizes := range [][2]int{{16, 16}, {1, 16}, {16, 64}, {64, 16}, {48, 32}} {
		t.Run(fmt.Sprint(sizes), func(t *testing.T) {
			p, d := pair(t, func(pc, dc *worker.Config) {
				patient(pc, dc)
				pc.KV.MinLoadTokens = 1
				pc.BlockTokens, dc.BlockTokens = sizes[0], sizes[1]
			})
			unit := max(16, sizes[0])
			if sizes[0] == 48 {
				unit = 96 // of 48 and 32
			}
			unit = max(unit, sizes[1])
			talk := []int32{1}
			for i := range int32(40) {
				talk = append(talk, 300+i)
			}
			for i := range 4 {
				want := complete(t, plain, nil, turn(talk, 70, ""))
				got := through(t, p, d, nil, turn(talk, 70, ""))
				same(t, fmt.Sprint("turn ", i), got, want)
				if least := (len(talk) - 7) / unit * unit; i > 0 && got.Usage.Details.Cached < least {
					t.Errorf("turn %d: %d of %d tokens cached, want %d", i, got.Usage.Details.Cached, len(talk), least)
				}
				talk = append(append(talk, got.Choices[0].TokenIDs...), 310, 320, 330, 340, 350)
			}
			if n := counter(t, p, `xpyd_kvtier_loaded_units_total{tier="peer"}`); n == 0 {
				t.Error("prefill has fetched nothing")
			}
			empty(t, p)
			empty(t, d)
		})
	}
}

// TestPeerHint: a worker that the router names gives what the pair lacks, from
// its pool and from its host memory; without a reason to fetch nobody does.
func TestPeerHint(t *testing.T) {
	prompts := stories(5)
	plain := start(t, nil)
	giver := start(t, func(c *worker.Config) {
		patient(c)
		c.Blocks, c.KV.HostMemory = 40, 4<<20 // the pool has three prompts, host memory all
	})
	p, d := pair(t, func(pc, dc *worker.Config) { patient(pc, dc) })
	want := make([][]int32, len(prompts))
	for i, s := range prompts {
		body := fmt.Sprintf(`{"prompt":%q,"max_tokens":12,"temperature":0.8,"seed":5,"return_token_ids":true}`, s)
		want[i] = complete(t, plain, nil, body).Choices[0].TokenIDs
		complete(t, giver, nil, body)
		soon(t, time.Minute, func() error { return settled(t, giver) })
	}
	for i, s := range prompts {
		body := fmt.Sprintf(`{"prompt":%q,"max_tokens":12,"temperature":0.8,"seed":5,"return_token_ids":true}`, s)
		a := through(t, p, d, peerHeader(giver, 192), body)
		if !reflect.DeepEqual(a.Choices[0].TokenIDs, want[i]) {
			t.Errorf("prompt %d: tokens %v, want %v", i, a.Choices[0].TokenIDs, want[i])
		}
		if a.Usage.Details.Cached < 192 {
			t.Errorf("prompt %d: %d of %d tokens cached", i, a.Usage.Details.Cached, a.Usage.Prompt)
		}
	}
	// A plain request fetches too.
	lone := start(t, func(c *worker.Config) { patient(c) })
	body := fmt.Sprintf(`{"prompt":%q,"max_tokens":12,"temperature":0.8,"seed":5,"return_token_ids":true}`, prompts[0])
	a := complete(t, lone, peerHeader(giver, 192), body)
	if a.Usage.Details.Cached < 192 || !reflect.DeepEqual(a.Choices[0].TokenIDs, want[0]) {
		t.Errorf("alone: %d of %d tokens cached, tokens %v", a.Usage.Details.Cached, a.Usage.Prompt, a.Choices[0].TokenIDs)
	}
	fetched := counter(t, lone, `xpyd_kvtier_peer_fetches_total{result="done"}`)
	complete(t, lone, peerHeader(giver, 192), body)
	if n := counter(t, lone, `xpyd_kvtier_peer_fetches_total{result="done"}`); fetched != 1 || n != 1 {
		t.Errorf("%v fetches, then %v; want one", fetched, n)
	}
	for _, w := range []*worker.Worker{p, d, giver, lone} {
		empty(t, w)
	}
}

// TestPeerSalt: a salted prefix goes to nobody over a connection that others
// can listen to; the request is served all the same, and so is a hint that
// makes no sense, or leads nowhere.
func TestPeerSalt(t *testing.T) {
	p, d := pair(t, func(pc, dc *worker.Config) { patient(pc, dc) })
	plain := start(t, nil)
	prompt := stories(1)[0]
	body := fmt.Sprintf(`{"prompt":%q,"max_tokens":40,"temperature":0.8,"seed":5,"cache_salt":"mine","return_token_ids":true}`, prompt)
	want := complete(t, plain, nil, body)
	first := through(t, p, d, nil, body)
	other := start(t, func(c *worker.Config) { patient(c) })
	for _, h := range []map[string]string{peerHeader(d, 192), {"x-xpyd-kv-peer": "nonsense"}, {"x-xpyd-kv-peer": "x 1 http://127.0.0.1:1 127.0.0.1:1 999"},
		{"x-xpyd-kv-peer": "x 1 http://192.0.2.1:1 192.0.2.1:1 999"}} {
		same(t, fmt.Sprint(h), complete(t, other, h, body), want)
		ask(t, other.URL()+"/xpyd/v1/cache/flush", nil, "")
	}
	same(t, "pair", first, want)
	if n := counter(t, d, `xpyd_kvtier_peer_refused_total{reason="salt"}`); n == 0 {
		t.Error("nothing was refused for its salt")
	}
	if n := counter(t, d, "xpyd_kvtier_peer_given_units_total"); n != 0 {
		t.Errorf("%v units of a salted prefix were given", n)
	}
	for _, w := range []*worker.Worker{p, d, other} {
		empty(t, w)
	}
}
