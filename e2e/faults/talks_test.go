package faults

import (
	"bufio"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/model/modeltest"
)

// talkingModel is one of random weights whose template shows a format of calls and one of reasoning.
var talkingModel = cluster.Once("talking", func(dir string) error {
	if err := random(modeltest.Stories15M())(dir); err != nil {
		return err
	}
	const template = "{% for m in messages %}{{ m.content }} {% endfor %}{# <tool_call> </think> #}"
	return os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(template), 0o600)
})

// Random weights call no tool of their own accord: a model that is free to call has its text bound to one with a call in it.
const (
	written  = `"structured_outputs":{"regex":"[A-Z][a-z ]{40,60}\\.<tool_call>\\n\\{\"name\": \"paint\", \"arguments\": \\{\"colour\": \"red\", \"words\": \\[\"[a-z ]{40,90}\"\\]\\}\\}\\n</tool_call>"}`
	thought  = `"structured_outputs":{"regex":"<think>[a-z ]{60,120}</think>[A-Z][a-z ]{20,40}"}`
	paint    = `{"type":"object","additionalProperties":false,"properties":{"colour":{"enum":["red","green"]},"words":{"type":"array","items":{"type":"string"},"minItems":4}},"required":["colour","words"]}`
	tale     = `{"type":"object","additionalProperties":false,"properties":{"title":{"type":"string"},"pages":{"type":"array","items":{"type":"integer"},"minItems":10}},"required":["title","pages"]}`
	talkBody = `{"model":"talking","stream":true,"temperature":0.9,`
)

// talks are streams of each API: a call that the model may make, calls that it must make, JSON, and thoughts.
var talks = map[string][]string{
	"/v1/chat/completions": in(`"messages":[{"role":"user","content":"Tell me of a dog"}],"max_tokens":180,"stream_options":{"include_usage":true}`,
		`"tools":[{"type":"function","function":{"name":"paint","parameters":`+paint+`}}]`,
		`"tool_choice":"required"`, `"tool_choice":{"type":"function","function":{"name":"paint"}}`,
		`"response_format":{"type":"json_schema","json_schema":{"name":"tale","schema":`+tale+`}}`),
	"/v1/responses": in(`"input":"Tell me of a dog","max_output_tokens":180`, `"tools":[{"type":"function","name":"paint","parameters":`+paint+`}]`,
		`"tool_choice":"required"`, `"tool_choice":{"type":"function","name":"paint"}`, `"text":{"format":{"type":"json_schema","name":"tale","schema":`+tale+`}}`),
	"/v1/messages": in(`"messages":[{"role":"user","content":"Tell me of a dog"}],"max_tokens":180`, `"tools":[{"name":"paint","input_schema":`+paint+`}]`,
		`"tool_choice":{"type":"any"}`, `"tool_choice":{"type":"tool","name":"paint"}`, `"output_config":{"format":{"type":"json_schema","schema":`+tale+`}}`),
}

func in(ask, tools, must, named, format string) []string {
	list := []string{ask + "," + tools + "," + written, ask + "," + tools + "," + must, ask + "," + tools + "," + named, ask + "," + format, ask + "," + thought}
	for i := range list {
		list[i] = fmt.Sprintf(`%s"seed":%d,%s}`, talkBody, i+1, list[i])
	}
	return list
}

// may are the parts of an event that two answers to one request may differ in: when, under which IDs, and how much was cached.
var may = regexp.MustCompile(`"(created|created_at|completed_at|cached_tokens|input_tokens|cache_read_input_tokens)":(\d+|null)|"(resp|msg|rs|fc|call|toolu)_\w+"`)

// talked is a stream: its events, without what may differ.
type talked struct {
	decode string
	events []string
	err    error
}

func talk(t *testing.T, client *http.Client, url, body string, met func(decode string, n int)) (a talked) {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return talked{err: err}
	}
	req.Header.Set("x-request-id", "talk")
	resp, err := client.Do(req)
	if err != nil {
		return talked{err: err}
	}
	defer resp.Body.Close()
	a.decode = resp.Header.Get("x-xpyd-decode")
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		a.events = append(a.events, may.ReplaceAllString(data, ""))
		met(a.decode, len(a.events))
	}
	if a.err = lines.Err(); a.err == nil && resp.StatusCode != http.StatusOK {
		a.err = fmt.Errorf("status %d: %s", resp.StatusCode, lines.Text())
	}
	return a
}

func talkAll(t *testing.T, client *http.Client, url, path string, met func(decode string, n int)) []talked {
	out := make([]talked, len(talks[path]))
	var wg sync.WaitGroup
	for i, body := range talks[path] {
		wg.Go(func() { out[i] = talk(t, client, url+path, body, met) })
	}
	wg.Wait()
	return out
}

// TestFaultsTakeoverTalks: calls, JSON and thoughts of all three APIs outlive a decode worker that is killed, and one that
// is drained, and each event is what it would have been.
func TestFaultsTakeoverTalks(t *testing.T) {
	t.Parallel()
	r := cluster.Alone(t, "--config", config(t), "--nats", cluster.StartNATS(t).URL)
	procs := map[string]*cluster.Process{}
	start := func(id string) {
		role, _, _ := strings.Cut(id, "-")
		procs[id] = r.Worker(t, fleet.Role(role), "--id", id, "--model", talkingModel(t))
	}
	for _, id := range []string{"prefill-0", "decode-0", "decode-1"} {
		start(id)
	}
	r.WaitServing(t, time.Minute, 1, 2)
	client := cluster.NewClient(t)
	order := func(id, what string) {
		if err := r.Call(http.MethodPost, "/admin/v1/instances/"+id+"/"+what, map[string]any{"force": true}, nil); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	continued := func() int {
		n, err := r.Metric(`xpyd_router_takeovers_total{outcome="continued",reason="drain"}`)
		if err != nil {
			t.Fatal(err)
		}
		return (&scene{Router: r}).continued(t) + int(n)
	}
	for path := range talks {
		want := talkAll(t, client, r.URL, path, func(string, int) {})
		for i, a := range want {
			last := strings.Join(a.events[max(len(a.events)-3, 0):], "\n")
			if a.err != nil || len(a.events) < 30 || strings.Contains(last, `"error":{`) {
				t.Fatalf("%s %d undisturbed: %v, %d events, %s", path, i, a.err, len(a.events), last)
			}
		}
		for _, fault := range []string{"kill", "drain"} {
			before := continued()
			var once sync.Once
			var under sync.WaitGroup
			victim := ""
			got := talkAll(t, client, r.URL, path, func(decode string, n int) {
				if n < 12 {
					return
				}
				once.Do(func() {
					if victim = decode; fault == "kill" {
						procs[decode].Kill()
					} else {
						under.Go(func() { order(decode, "drain") })
					}
				})
			})
			under.Wait()
			for i := range got {
				if got[i].err != nil || !slices.Equal(got[i].events, want[i].events) {
					n := 0
					for n < min(len(got[i].events), len(want[i].events)) && got[i].events[n] == want[i].events[n] {
						n++
					}
					t.Errorf("%s %d by %s, %s %s: %v, differs at event %d of %d and %d:\n%q\n%q", path, i, got[i].decode, fault, victim, got[i].err, n, len(got[i].events), len(want[i].events),
						got[i].events[n:min(n+2, len(got[i].events))], want[i].events[n:min(n+2, len(want[i].events))])
				}
			}
			if continued() == before {
				t.Errorf("%s: %s of %s: no stream was taken over", path, fault, victim)
			}
			if fault == "kill" {
				<-procs[victim].Done()
				start(victim)
			} else {
				order(victim, "undrain")
			}
			r.WaitServing(t, time.Minute, 1, 2)
		}
	}
	cluster.Wait(t, afterKnown+slack, "ledgers empty", r.Idle)
}
