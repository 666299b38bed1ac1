package router_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	fake "github.com/xpyd/xpyd/internal/mock"
	"github.com/xpyd/xpyd/router"
)

// clientSaw is what a client gets by a stream.
type clientSaw struct {
	id, text, finish string
	roles, prompt    int
	completion       int
	err              string
	done             bool
}

// read takes a stream apart; all chunks must have one id and no token ids.
func (g *rig) read(stream string) (out clientSaw) {
	g.t.Helper()
	for event := range strings.SplitSeq(stream, "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if !ok {
			continue
		}
		if out.done = data == "[DONE]"; out.done {
			continue
		}
		var c struct {
			ID, Object string
			Choices    []struct {
				Index  int
				Text   string
				Finish string `json:"finish_reason"`
				IDs    []int  `json:"token_ids"`
				Prompt []int  `json:"prompt_token_ids"`
				Delta  *struct{ Role, Content string }
			}
			Usage *struct {
				Prompt     int `json:"prompt_tokens"`
				Completion int `json:"completion_tokens"`
				Total      int `json:"total_tokens"`
			}
			Prompt []int `json:"prompt_token_ids"`
			Error  *struct{ Message string }
		}
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			g.t.Fatalf("%v in %q", err, event)
		}
		if c.Error != nil {
			out.err = c.Error.Message
			continue
		}
		if id := c.ID + " " + c.Object; out.id == "" {
			out.id = id
		} else if out.id != id {
			g.t.Errorf("%q is not of %q", event, out.id)
		}
		if c.Prompt != nil || len(c.Choices) > 1 {
			g.t.Errorf("%q", event)
		}
		for _, ch := range c.Choices {
			if ch.IDs != nil || ch.Prompt != nil || ch.Index != 0 || out.finish != "" {
				g.t.Errorf("%q", event)
			}
			out.text += ch.Text
			if out.finish = ch.Finish; ch.Delta != nil {
				out.text += ch.Delta.Content
				if ch.Delta.Role != "" {
					out.roles++
				}
			}
		}
		if u := c.Usage; u != nil {
			if out.prompt, out.completion = u.Prompt, u.Completion; u.Total != u.Prompt+u.Completion {
				g.t.Errorf("%q", event)
			}
		}
	}
	return out
}

// replaying are the dialects whose streams another pair can go on with.
var replaying = []string{"storage", "vllm-mooncake", "vllm-nixl", "vllm-nixl-push", "vllm-offloading", "vllm-p2pnccl"}

// replayRig is pairs of engines whose text is a function of their tokens.
func replayRig(t *testing.T, dialect string, x, y, burst int, edit func(*router.Config)) (*rig, []*fake.Engine) {
	t.Helper()
	change := func(c *fake.Config) { c.Tokens, c.Burst = true, burst }
	_, list := engines(t, dialect, fleet.Prefill, x, change)
	ds, more := engines(t, dialect, fleet.Decode, y, change)
	g := newRig(t, 0, 0, func(c *router.Config) {
		if c.Static, c.TakeoverReplay = append(list, more...), true; edit != nil {
			edit(c)
		}
	})
	g.allProbed(x + y)
	return g, ds
}

func replayAsk(i, most int) (path, body string) {
	more := []string{``, `,"stop":["upon a","\n"]`, `,"stop":"é once"`, `,"stop":["日本 once upon a time"],"stop_token_ids":[5]`}[i/6%4]
	more += []string{`,"stream_options":{"include_usage":true}`, "", `,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`}[i%3]

	if i%2 == 0 {
		return "/v1/completions", fmt.Sprintf(`{"model":"m","prompt":"Once upon %d","stream":true,"temperature":0,"min_tokens":%d,"max_tokens":%d%s}`, i, most/2, most, more)
	}
	return "/v1/chat/completions", fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"Hi %d"}],"stream":true%s}`, i, more)
}

// TestReplayForeign: a stream of a foreign engine that breaks at any event is what an undisturbed one
// would have been.
func TestReplayForeign(t *testing.T) {
	t.Parallel()
	for i, dialect := range replaying {
		for burst := range 2 {
			t.Run(fmt.Sprintf("%s, burst %d", dialect, burst), func(t *testing.T) {
				t.Parallel()
				replayForeign(t, dialect, burst*(1+i))
			})
		}
	}
}

func replayForeign(t *testing.T, dialect string, burst int) {
	g, ds := replayRig(t, dialect, 1, 2, burst, nil)
	seams := 0
	for i := range 32 {
		path, body := replayAsk(i, 40)
		resp, text := g.post(path, body, "x-xpyd-takeover", "0")
		want := g.read(text)
		if resp.StatusCode != 200 || !want.done || want.finish == "" {
			t.Fatalf("%d %s", resp.StatusCode, text)
		}
		events := strings.Count(text, "data: ")
		cut := 1 + rand.IntN(events-1)
		if i < 4 { // behind the last token
			cut = events - 1 - i/2
		}
		faulty(ds, fake.Fault{Cut: cut}, nil)
		_, text = g.post(path, body, "x-request-id", fmt.Sprintf("r%d", i))
		got := g.read(text)
		seams += strings.Count(text, ": xpyd seam")
		if got != want {
			t.Fatalf("%s %s, cut behind %d of %d events:\n%+v\nwant\n%+v", path, body, cut, events, got, want)
		}
	}
	if seams < 10 { // fewer where only [DONE] was missing
		t.Errorf("%d seams", seams)
	}
	g.until("the ledger to be empty", g.idle)
}

// faulty has the first leg of the decodes meet one fault, and the later ones another.
func faulty(ds []*fake.Engine, one fake.Fault, then *fake.Fault) {
	one.Left, one.Then = &atomic.Int32{}, then
	one.Left.Store(1)
	for _, d := range ds {
		d.SetFault(one)
	}
}

// asked returns the decodes' requests, in no order.
func asked(ds []*fake.Engine) (out []fake.Record) {
	for _, d := range ds {
		out = append(out, d.Records()...)
	}
	return out
}

// TestReplayFaults: how a foreign engine's stream can break, and what may go wrong at the next.
func TestReplayFaults(t *testing.T) {
	t.Parallel()
	_, body := replayAsk(0, 40)
	for _, c := range []struct {
		name  string
		one   fake.Fault
		then  *fake.Fault
		seams int
		err   string
		legs  int
		count map[string]int
	}{
		{name: "its core dies", one: fake.Fault{Fail: 5}, seams: 1, legs: 2, count: map[string]int{"continued": 1}},
		{name: "it falls silent", one: fake.Fault{Freeze: 5}, seams: 1, legs: 2, count: map[string]int{"continued": 1}},
		{name: "so does the next", one: fake.Fault{Cut: 5}, then: &fake.Fault{Cut: 4, Left: onceMore(), Then: &fake.Fault{}}, seams: 2, legs: 3, count: map[string]int{"continued": 2}},
		{name: "all others refuse", one: fake.Fault{Cut: 5}, then: &fake.Fault{Status: 400}, err: "status 400 was ordered", legs: 3, count: map[string]int{"failed": 1}},
		{name: "the next begins with an error", one: fake.Fault{Cut: 5}, then: &fake.Fault{Event: true}, err: "error event was ordered", legs: 4, count: map[string]int{"failed": 1}},
		{name: "the next reads another prompt", one: fake.Fault{Cut: 5}, then: &fake.Fault{Amiss: true}, err: "the tokens that it was sent", legs: 2, count: map[string]int{"failed": 1}},
		{name: "no ids", one: fake.Fault{Cut: 5, NoIDs: true}, err: "it did not say which tokens", legs: 1, count: map[string]int{"unkept": 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g, ds := replayRig(t, "storage", 1, 2, 0, func(cfg *router.Config) { cfg.ChunkTimeout = time.Second })
			_, text := g.post("/v1/completions", body, "x-xpyd-takeover", "0")
			want, before := g.read(text), len(asked(ds))
			faulty(ds, c.one, c.then)
			_, text = g.post("/v1/completions", body)
			got := g.read(text)
			if c.err != "" {
				if !strings.HasPrefix(want.text, got.text) || got.text == "" || !strings.Contains(got.err, c.err) {
					t.Errorf("%+v, want an error with %q", got, c.err)
				}
			} else if got != want {
				t.Errorf("%+v\nwant\n%+v", got, want)
			}
			if n := strings.Count(text, seam); n != c.seams {
				t.Errorf("%d seams", n)
			}
			if n := len(asked(ds)) - before; n != c.legs {
				t.Errorf("%d legs", n)
			}
			g.takeovers(c.count)
			g.until("the ledger to be empty", g.idle)
		})
	}
}

func onceMore() *atomic.Int32 {
	n := &atomic.Int32{}
	n.Store(1)
	return n
}

// TestReplayContext: a chat without a limit goes on for as long as the next engine's context allows.
func TestReplayContext(t *testing.T) {
	t.Parallel()
	g, ds := replayRig(t, "vllm-nixl", 1, 2, 0, func(c *router.Config) {
		for i := range c.Static {
			c.Static[i].MaxModelLen = 40
		}
	})
	faulty(ds, fake.Fault{Cut: 8}, nil)
	_, text := g.post("/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"Hi 1"}],"stream":true,"min_tokens":20}`)
	if got := g.read(text); !strings.Contains(got.err, "all its tokens") || got.text == "" {
		t.Errorf("%s", text)
	}
	g.takeovers(map[string]int{"failed": 1})
}

// TestReplayNot: engines are not asked for ids where that would be of no use, and their streams end as
// ever.
func TestReplayNot(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, dialect, fields, header string }{
		{name: "the client wants none", dialect: "storage", header: "0"},
		{name: "a seed", dialect: "storage", fields: `,"seed":1`},
		{name: "its own ids", dialect: "storage", fields: `,"return_token_ids":true`},
		{name: "another dialect", dialect: "sglang"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g, ds := replayRig(t, c.dialect, 1, 2, 0, nil)
			faulty(ds, fake.Fault{Cut: 3}, nil)
			_, text := g.post("/v1/completions", `{"model":"m","prompt":"Once upon","min_tokens":8,"stream":true`+c.fields+`}`, "x-xpyd-takeover", c.header)
			if !strings.Contains(text, `{"error":`) || strings.Contains(text, seam) || strings.Contains(text, "[DONE]") {
				t.Errorf("%s", text)
			}
			legs := asked(ds)
			if own := strings.Contains(c.fields, "return"); len(legs) != 1 || strings.Contains(legs[0].Body, "return_token_ids") != own {
				t.Errorf("%+v", legs)
			}
			g.takeovers(nil)
		})
	}
}
