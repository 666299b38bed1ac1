package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/worker"
)

// play is what all devices of a fleet say: a script behind a prompt of given length. The first of them to
// get to a place stops there until it is let go.
type play struct {
	mu      sync.Mutex
	at      int     // the prompt's length; 0: nothing is played
	ids     []int32 // 2, the end, behind them
	stop    int     // where the first one stops
	stopped chan *actor
	letGo   chan struct{}
}

type actor struct {
	kernels.Backend
	play *play
}

func (a *actor) Step(s *kernels.Step) ([]kernels.Result, error) {
	results, err := a.Backend.Step(s)
	if err != nil {
		return results, err
	}
	for i := range s.Seqs {
		for j, sample := range s.Seqs[i].Samples {
			if id, ok := a.play.say(a, sample.Position); ok {
				results[i].Samples[j].Token = id
			}
		}
	}
	return results, nil
}

func (p *play) say(a *actor, position int) (id int32, ok bool) {
	p.mu.Lock()
	n, stops := position-p.at, false
	if ok = p.at > 0 && n >= 0; ok {
		if id = 2; n < len(p.ids) {
			id = p.ids[n]
		}
		if stops = n == p.stop; stops {
			p.stop = -1
		}
	}
	p.mu.Unlock()
	if stops {
		p.stopped <- a
		<-p.letGo
	}
	return id, ok
}

// TestToolCallsTakenOver: a decode worker ends in the midst of a call. Another goes on, and the client
// has one call, with one id and whole arguments.
func TestToolCallsTakenOver(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "m")
	if err := os.CopyFS(dir, os.DirFS("../internal/model/stories260k")); err != nil {
		t.Fatal(err)
	}
	const template = `{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> </think> #}`
	if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(template), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &play{stopped: make(chan *actor, 1), letGo: make(chan struct{})}
	watcher, nats := startFleet(t)
	workers := map[*actor]*worker.Worker{}
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode, fleet.Decode} {
		a := &actor{play: p}
		workers[a] = startWorker(t, role, func(c *worker.Config) { c.Fleet.URL, c.Model, c.KV.Transport = nats, dir, "tcp" },
			func(d *worker.Deps) {
				d.Backend = func(b kernels.Backend) kernels.Backend { a.Backend = b; return a }
			})
	}
	url := startRouter(t, router.Deps{Fleet: watcher})

	const fields = `"messages":[{"role":"user","content":"Once upon a time"}],"max_tokens":200,"tools":[{"type":"function","function":{"name":"f"}}]`
	resp, err := http.Post(url+"/tokenize", "application/json", strings.NewReader("{"+fields+"}"))
	if err != nil {
		t.Fatal(err)
	}
	var tokens struct{ Count int }
	err = json.NewDecoder(resp.Body).Decode(&tokens)
	resp.Body.Close()
	if err != nil || tokens.Count == 0 {
		t.Fatalf("%+v, %v", tokens, err)
	}
	const text = `<think>é?</think>Yes. <tool_call>{"name": "f", "arguments": {"city": "Zürich", "days": [1, 2]}}</tool_call>`
	p.mu.Lock()
	p.at, p.stop = tokens.Count, strings.Index(text, "ürich")+1 // between the two bytes of a letter
	for _, b := range []byte(text) {
		p.ids = append(p.ids, 3+int32(b)) // the vocabulary has each byte at 3
	}
	p.mu.Unlock()

	resp, err = http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(`{"stream":true,"stream_options":{"include_usage":true},`+fields+`}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	ended := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // running requests get no time to finish
		ended <- workers[<-p.stopped].Close(ctx)
	}()
	var content, reasoning, arguments, finish string
	var ids []string
	usage, seams := "", 0
	in := bufio.NewScanner(resp.Body)
	for in.Scan() {
		if strings.HasPrefix(in.Text(), ": xpyd seam") {
			seams++
		}
		data, ok := strings.CutPrefix(in.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var e struct {
			Choices []struct {
				Delta struct {
					Content, Reasoning string
					Calls              []struct {
						ID       string
						Function struct{ Name, Arguments string }
					} `json:"tool_calls"`
				}
				Finish string `json:"finish_reason"`
			}
			Usage json.RawMessage
		}
		if err := json.Unmarshal([]byte(data), &e); err != nil || strings.HasPrefix(data, `{"error"`) {
			t.Fatalf("%v: %s", err, data)
		}
		if string(e.Usage) != "null" {
			usage = string(e.Usage)
		}
		for _, c := range e.Choices {
			content, reasoning, finish = content+c.Delta.Content, reasoning+c.Delta.Reasoning, finish+c.Finish
			for _, call := range c.Delta.Calls {
				if arguments += call.Function.Arguments; call.ID != "" {
					ids = append(ids, call.ID+" "+call.Function.Name)
				}
			}
		}
	}
	close(p.letGo)
	if err := <-ended; err != nil {
		t.Errorf("close: %v", err)
	}
	// The reasoning is known to have begun at the last byte of its mark.
	wantUsage := fmt.Sprintf(`"completion_tokens_details":{"reasoning_tokens":%d}`, len(">é?</think>"))
	if seams != 1 || content != "Yes. " || reasoning != "é?" || arguments != `{"city": "Zürich", "days": [1, 2]}` || finish != "tool_calls" ||
		len(ids) != 1 || !strings.HasPrefix(ids[0], "call_") || !strings.HasSuffix(ids[0], " f") {
		t.Errorf("%d seams, content %q, reasoning %q, calls %q of %q, finish %q", seams, content, reasoning, ids, arguments, finish)
	}
	if want := fmt.Sprintf(`"completion_tokens":%d,`, len(text)+1); !strings.Contains(usage, want) || !strings.Contains(usage, wantUsage) {
		t.Errorf("usage %s, want %s and %s", usage, want, wantUsage)
	}
}
