package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

const (
	replayPart    = "replay"
	replayStreams = 24
	replayTokens  = 128
	replayAfter   = 16 // events of each stream of the victim when it is killed
)

// telling is a stream as its client sees it.
type telling struct {
	decode, text, finish, id string
	tokens                   int // by its usage
	at                       []time.Time
	seam                     int // how many events with text there were, or -1
	first                    time.Duration
}

// replay kills one of two vLLM servers in the middle of its streams: the router goes on with them at the
// other. What each answer would have been is told by an undisturbed run; vLLM's own repeatability by another.
func (o *vllm) replay(ctx context.Context) error {
	if o.peer != "" {
		return errors.New("replay starts its servers itself: without -peer")
	}
	if err := o.prepare(ctx); err != nil {
		return err
	}
	var engines [2]*harness.Process
	var list []string
	for i := range engines {
		addr, err := harness.FreeAddr()
		if err != nil {
			return err
		}
		s := o.engine(addr, "--gpu-memory-utilization", "0.42")
		if o.device == "cpu" { // a rehearsal: our worker tells ids as vLLM does
			s = harness.Spec{Name: "decode", Env: plainEnv(), Argv: []string{o.XPYD, "decode", "--trust-everyone", "--served-name", "model", "--listen", addr}}
		}
		if engines[i], err = o.Bench.Start(s); err != nil {
			return err
		}
		defer engines[i].Kill()
		if err := o.answers(ctx, "http://"+addr, engines[i]); err != nil { // one after the other, as each asks what memory is free
			return err
		}
		for _, role := range []string{"prefill", "decode"} {
			list = append(list, fmt.Sprintf("  - {id: %s%d, role: %s, url: \"http://%s\", dialect: storage, model: model}", role, i, role, addr))
		}
	}
	addr, err := harness.FreeAddr()
	if err != nil {
		return err
	}
	config := filepath.Join(o.Dir, "replay.yaml")
	text := "takeover_replay: true\nfleet: {listen: \"127.0.0.1:0\"}\nstatic:\n" + strings.Join(list, "\n") + "\n"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return err
	}
	router, err := o.Bench.Start(harness.Spec{Name: "router", Env: plainEnv(),
		Argv: []string{o.XPYD, "router", "--trust-everyone", "--config", config, "--listen", addr, "--admin", "127.0.0.1:0", "--data", filepath.Join(o.Dir, "replay")}})
	if err != nil {
		return err
	}
	defer router.Kill()
	if err := o.answers(ctx, "http://"+addr, router); err != nil {
		return err
	}
	var runs [3][]*telling
	for i := range runs {
		victim := engines[0]
		if i < 2 {
			victim = nil
		}
		if runs[i], err = o.tell(ctx, "http://"+addr, victim); err != nil {
			return errors.Join(err, errors.New(harness.Logs(router)))
		}
	}
	return errors.Join(o.replayFigures(ctx, runs), router.Stop())
}

// tell sends all streams at once. A victim, which must be the first engine, is killed once each of its streams has
// enough events.
func (o *vllm) tell(ctx context.Context, url string, victim *harness.Process) (list []*telling, err error) {
	var mu sync.Mutex
	begun, its, reached := 0, 0, 0
	var killed time.Time
	met := func(t *telling) {
		mu.Lock()
		defer mu.Unlock()
		n := len(t.at)
		if n == 1 {
			begun++
		}
		if t.decode != "decode0" || victim == nil || !killed.IsZero() {
			return
		}
		if n == 1 {
			its++
		}
		if n == replayAfter {
			reached++
		}
		if begun == replayStreams && reached == its {
			killed = time.Now()
			victim.Kill()
		}
	}
	var all errgroup.Group
	list = make([]*telling, replayStreams)
	for i := range list {
		list[i] = &telling{seam: -1}
		all.Go(func() error {
			if err := list[i].ask(ctx, url, i, o.device == "cpu", met); err != nil {
				return fmt.Errorf("stream %d of %s, %d events: %w", i, list[i].decode, len(list[i].at), err)
			}
			return nil
		})
	}
	return list, all.Wait()
}

// ask sends the i-th request: a chat or a completion, greedy, of so many tokens as may come.
func (t *telling) ask(ctx context.Context, url string, i int, short bool, met func(*telling)) error {
	words := 700
	if short {
		words = 20
	}
	var prompt strings.Builder
	for w := range words {
		fmt.Fprintf(&prompt, "%c%c ", 'a'+(w+i)%26, 'a'+(w*w+7*i)%26)
	}
	path, ask := "/v1/completions", fmt.Sprintf(`"prompt":%q`, prompt.String())
	if i%2 == 0 && !short { // the small model has no template for chats
		path, ask = "/v1/chat/completions", fmt.Sprintf(`"messages":[{"role":"user","content":%q}]`, prompt.String())
	}
	body := fmt.Sprintf(`{"model":"model",%s,"stream":true,"stream_options":{"include_usage":true},"temperature":0,"ignore_eos":true,"max_tokens":%d}`, ask, replayTokens)
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+path, strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("content-type", "application/json")
	asked := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10)) // to be told
		return fmt.Errorf("%s: %s", resp.Status, text)
	}
	t.decode = resp.Header.Get("x-xpyd-decode")
	return t.read(bufio.NewScanner(resp.Body), asked, met)
}

func (t *telling) read(lines *bufio.Scanner, asked time.Time, met func(*telling)) error {
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), ": xpyd seam") {
			t.seam = len(t.at)
		}
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return nil
		}
		var e struct {
			ID      string
			Error   any
			Choices []struct {
				Text   string
				Delta  struct{ Content string }
				Finish string `json:"finish_reason"`
			}
			Usage *struct {
				Tokens int `json:"completion_tokens"`
			}
			IDs any `json:"prompt_token_ids"`
		}
		if err := json.Unmarshal([]byte(data), &e); err != nil || e.Error != nil || e.IDs != nil {
			return fmt.Errorf("the event %s", data)
		}
		if t.id == "" {
			t.id = e.ID
		}
		if e.ID != t.id {
			return fmt.Errorf("the stream %s goes on as %s", t.id, e.ID)
		}
		if e.Usage != nil {
			t.tokens = e.Usage.Tokens
		}
		for _, c := range e.Choices {
			if t.finish += c.Finish; c.Text+c.Delta.Content == "" {
				continue
			}
			t.text += c.Text + c.Delta.Content
			t.at = append(t.at, time.Now())
			if len(t.at) == 1 {
				t.first = t.at[0].Sub(asked)
			}
			met(t)
		}
	}
	return errors.Join(lines.Err(), errors.New("the stream ends without [DONE]"))
}

// replayFigures compares two undisturbed runs and the one with a kill.
func (o *vllm) replayFigures(ctx context.Context, runs [3][]*telling) error {
	var pauses, firsts []float64
	same, alike, seams := 0, 0, 0
	for i, t := range runs[2] {
		want := runs[0][i]
		if t.finish != "length" || t.tokens != replayTokens || t.tokens != want.tokens {
			return fmt.Errorf("stream %d ends by %q after %d tokens, undisturbed by %q after %d", i, t.finish, t.tokens, want.finish, want.tokens)
		}
		if t.seam < 1 {
			continue
		}
		seams++
		if t.text == want.text {
			same++
		}
		if runs[1][i].text == want.text {
			alike++
		}
		firsts = append(firsts, ms(want.first))
		pauses = append(pauses, ms(t.at[t.seam].Sub(t.at[t.seam-1])))
	}
	if seams == 0 {
		return errors.New("no stream was hit")
	}
	what := fmt.Sprintf("two vLLM servers of a Llama-3-8B shape on one GPU, random bf16 weights; kill -9 of one under %d greedy streams, chats and completions, of %d tokens; %d of them went on at the other, all to their last token", replayStreams, replayTokens, seams)
	o.Book.On(o.on(ctx))
	pause := figures.Figure{Name: "stream.replay_pause_ms", Unit: "ms", Peer: "a first token of the same streams at once, undisturbed", Model: what}
	equal := figures.Figure{Name: "stream.replay_same", Value: float64(same), Unit: "streams of the same text as undisturbed", Peer: "between two undisturbed runs", PeerValue: float64(alike),
		Ratio: float64(same) / max(float64(alike), 1), Runs: 1, Spread: "one run", Model: what}
	return o.Add(pause.Ratios(pauses, firsts), equal)
}
