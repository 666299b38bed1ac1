package worker_test

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/worker"
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
	done := leg(p, link)
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

// peerHeader names a worker that has that many tokens of a prompt.
func peerHeader(w *worker.Worker, tokens int) map[string]string {
	i := w.Instance()
	return map[string]string{"x-xpyd-kv-peer": fmt.Sprintf("%s %d %s %s %d", i.ID, i.Epoch, i.URL, i.KVAddr, tokens)}
}

// patient is for tests that are not about time: on a starved machine a fetch
// may take long, and must not be given up.
func patient(list ...*worker.Config) {
	for _, c := range list {
		c.KV.LoadTimeout = patience
	}
}

// bothWays runs a test with fetches that are over before a request is queued, and with
// those that its steps are launched behind; set is patient, and says which.
func bothWays(t *testing.T, do func(t *testing.T, set func(list ...*worker.Config))) {
	for _, bring := range []string{"off", "on"} {
		t.Run("bring "+bring, func(t *testing.T) {
			do(t, func(list ...*worker.Config) {
				patient(list...)
				for _, c := range list {
					c.KV.PeerBring = bring
				}
			})
		})
	}
}

// TestTurns: what decode has computed of turn n, its answer, prefill fetches
// for turn n+1; the tokens are those of one worker that computes everything.
func TestTurns(t *testing.T) {
	bothWays(t, func(t *testing.T, set func(...*worker.Config)) {
		plain := start(t, nil)
		for _, sizes := range [][2]int{{16, 16}, {1, 16}, {16, 64}, {64, 16}, {48, 32}} {
			t.Run(fmt.Sprint(sizes), func(t *testing.T) {
				p, d := pair(t, func(pc, dc *worker.Config) {
					set(pc, dc)
					pc.KV.MinLoadTokens = 1
					pc.BlockTokens, dc.BlockTokens = sizes[0], sizes[1]
				})
				unit := max(16, sizes[0])
				if sizes[0] == 48 {
					unit = 96 // of 48 and 32
				}
				unit = max(unit, sizes[1])
				turns(t, plain, p, d, unit)
			})
		}
	})
}

// turns talks with a pair over several turns: each has the tokens of plain, which
// computes everything, and the prefix in whole units from a cache, a peer's too.
func turns(t *testing.T, plain, p, d *worker.Worker, unit int) {
	t.Helper()
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
}

// TestPeerHint: a worker that the router names gives what the pair lacks, from its pool and from
// its host memory; without a reason to fetch, nothing is fetched.
func TestPeerHint(t *testing.T) {
	bothWays(t, func(t *testing.T, set func(...*worker.Config)) {
		prompts := stories(5)
		plain := start(t, nil)
		giver := start(t, func(c *worker.Config) {
			set(c)
			c.Blocks, c.KV.HostMemory = 40, 4<<20 // the pool has three prompts, host memory all
		})
		p, d := pair(t, func(pc, dc *worker.Config) { set(pc, dc) })
		want := make([][]int32, len(prompts))
		for i, s := range prompts {
			body := storyBody(s)
			want[i] = complete(t, plain, nil, body).Choices[0].TokenIDs
			complete(t, giver, nil, body)
			settle(t, giver)
		}
		for i, s := range prompts {
			body := storyBody(s)
			a := through(t, p, d, peerHeader(giver, 192), body)
			if !reflect.DeepEqual(a.Choices[0].TokenIDs, want[i]) {
				t.Errorf("prompt %d: tokens %v, want %v", i, a.Choices[0].TokenIDs, want[i])
			}
			if a.Usage.Details.Cached < 192 {
				t.Errorf("prompt %d: %d of %d tokens cached", i, a.Usage.Details.Cached, a.Usage.Prompt)
			}
		}
		// A plain request fetches too.
		lone := start(t, func(c *worker.Config) { set(c) })
		body := storyBody(prompts[0])
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
	})
}

// TestPeerSalt: a salted prefix is never sent over a connection that others can listen to. The
// request is served all the same, and so is one with a malformed or useless hint.
func TestPeerSalt(t *testing.T) {
	bothWays(t, func(t *testing.T, set func(...*worker.Config)) {
		p, d := pair(t, func(pc, dc *worker.Config) { set(pc, dc) })
		plain := start(t, nil)
		prompt := stories(1)[0]
		body := fmt.Sprintf(`{"prompt":%q,"max_tokens":40,"temperature":0.8,"seed":5,"cache_salt":"mine","return_token_ids":true}`, prompt)
		want := complete(t, plain, nil, body)
		first := through(t, p, d, nil, body)
		other := start(t, func(c *worker.Config) { set(c) })
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
		keyed := map[string]string{"x-xpyd-cache-salt": "alice"} // a name, and no secret
		open := storyBody(prompt)
		complete(t, d, keyed, open)
		maps.Copy(keyed, peerHeader(d, 192))
		complete(t, start(t, func(c *worker.Config) { set(c) }), keyed, open) // other leaves d alone now
		if n := counter(t, d, "xpyd_kvtier_peer_given_units_total"); n == 0 {
			t.Error("nothing of an API key's prefix was given")
		}
		for _, w := range []*worker.Worker{p, d, other} {
			empty(t, w)
		}
	})
}

// TestPeerLies: whatever a peer claims and then has, the request is answered with the right
// tokens. A peer that failed is left alone, and the worker logs it.
func TestPeerLies(t *testing.T) {
	bothWays(t, func(t *testing.T, set func(...*worker.Config)) {
		giver := start(t, func(c *worker.Config) { set(c) })
		prompt := stories(1)[0]
		body := storyBody(prompt)
		want := complete(t, giver, nil, body)
		flush := func() { ask(t, giver.URL()+"/xpyd/v1/cache/flush", nil, "") }
		say := func(text string) http.HandlerFunc {
			return func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, text) }
		}
		for name, c := range map[string]struct {
			answer http.HandlerFunc
			hangs  bool
			result string
		}{
			"too many":     {answer: say(`{"units":1000000}`), result: "failed"},
			"negative":     {answer: say(`{"units":-1}`), result: "failed"},
			"no number":    {answer: say(`{"units":"12"}`), result: "failed"},
			"no JSON":      {answer: say(`<html>`), result: "failed"},
			"endless":      {answer: say(strings.Repeat(" ", 1<<20) + `{"units":12}`), result: "failed"},
			"none":         {answer: say(`{"units":0}`), result: "nothing"},
			"what it lost": {answer: say(`{"units":12}`), result: "failed"},
			"an error":     {answer: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, result: "failed"},
			"elsewhere": {answer: func(w http.ResponseWriter, r *http.Request) {
				http.Redirect(w, r, giver.URL()+r.URL.Path, http.StatusTemporaryRedirect)
			}, result: "failed"},
			"hung up": {answer: func(w http.ResponseWriter, _ *http.Request) {
				conn, _, _ := w.(http.Hijacker).Hijack()
				conn.Close()
			}, result: "failed"},
			"hangs": {answer: func(_ http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body) // else the server does not notice who leaves
				<-r.Context().Done()
			}, hangs: true, result: "failed"},
			"evicted meanwhile": {answer: func(w http.ResponseWriter, r *http.Request) {
				complete(t, giver, nil, body)
				resp, err := client.Post(giver.URL()+r.URL.Path, "application/json", r.Body)
				if err != nil {
					t.Error(err)
					return
				}
				defer resp.Body.Close()
				io.Copy(w, resp.Body)
				flush()
			}, result: "failed"},
		} {
			t.Run(name, func(t *testing.T) {
				flush()
				srv := httptest.NewServer(c.answer)
				defer srv.Close()
				w := start(t, func(cfg *worker.Config) {
					set(cfg)
					if c.hangs {
						cfg.KV.LoadTimeout = 500 * time.Millisecond
					}
				})
				i := giver.Instance()
				hint := map[string]string{"x-xpyd-kv-peer": fmt.Sprintf("%s %d %s %s 192", i.ID, i.Epoch, srv.URL, i.KVAddr)}
				began := time.Now()
				same(t, name, complete(t, w, hint, body), want)
				if took := time.Since(began); took > patience/4 {
					t.Errorf("it took %v", took)
				}
				if n := counter(t, w, fmt.Sprintf(`xpyd_kvtier_peer_fetches_total{result=%q}`, c.result)); n != 1 {
					t.Errorf("%v fetches are %s; %s", n, c.result, metrics(t, w))
				}
				_, b := send(t, http.MethodGet, w.URL()+"/xpyd/v1/cache", nil, "")
				var info struct {
					Peers struct {
						Shut []struct {
							ID        string
							LastError string `json:"last_error"`
						}
					}
				}
				if err := json.Unmarshal(b, &info); err != nil {
					t.Fatal(err)
				}
				if shut := info.Peers.Shut; c.result == "failed" && time.Since(began) < time.Second && (len(shut) != 1 || shut[0].ID != i.ID || shut[0].LastError == "") {
					t.Errorf("shut: %+v", shut)
				}
				empty(t, w)
			})
		}
		empty(t, giver)
	})
}

// TestReachRefused: the question has bounds, and no worker without peers
// answers that it has anything.
func TestReachRefused(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.KV.Peers = "off" })
	for _, body := range []string{"", "{}", `{"units":["zz"]}`, `{"units":[]}`} {
		if resp, b := ask(t, w.URL()+"/xpyd/v1/cache/reach", nil, body); resp.StatusCode != 400 || !strings.Contains(string(b), `"param":"units"`) {
			t.Errorf("%q: %d %s", body, resp.StatusCode, b)
		}
	}
	if resp, b := ask(t, w.URL()+"/xpyd/v1/cache/reach", nil, `{"units":["`+strings.Repeat("00", 16)+`"]}`); resp.StatusCode != 200 || string(b) != `{"units":0}` {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
	// Nor does it fetch or give, and pairs work all the same.
	p, d := pair(t, func(pc, dc *worker.Config) { pc.KV.Peers = "off" })
	for range 2 {
		through(t, p, d, peerHeader(d, 64), turn([]int32{1, 300, 301, 302, 303, 304}, 60, ""))
	}
	empty(t, p)
	empty(t, d)
}
