package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// answersBench has a real model answer schemas of JSONSchemaBench through `xpyd up`, one prefill
// and one decode worker, and asks Python's jsonschema whether what it says is valid.
type answersBench struct {
	base
	schemas, model, venv   string
	count, tokens, longest int
	clients                int
}

func (b *answersBench) flags(f *flag.FlagSet) {
	f.StringVar(&b.schemas, "schemas", "", "folder of the repository guidance-ai/jsonschemabench")
	f.StringVar(&b.model, "model", "", "a chat model, such as SmolLM2-135M-Instruct's GGUF (scripts/smollm2 fetches it)")
	f.StringVar(&b.venv, "venv", "", "virtual environment with jsonschema; made in the user's cache if empty")
	f.IntVar(&b.count, "answers", 300, "schemas to answer, drawn at random")
	f.IntVar(&b.tokens, "tokens", 500, "tokens of an answer at most; longer ones do not finish")
	f.IntVar(&b.longest, "longest", 3000, "bytes of a schema at most: it is in the prompt too")
	f.IntVar(&b.clients, "clients", 16, "requests at once")
}

func (b *answersBench) parts() []part { return []part{{"valid", b.valid}} }

func (b *answersBench) open(context.Context) error {
	if b.schemas == "" || b.model == "" {
		return errors.New("-schemas and -model are needed")
	}
	return nil
}

// bound is an answer, and what it must be. Its fields are what scripts/grammar/check.py reads.
type bound struct {
	Name   string          `json:"name"`
	Schema json.RawMessage `json:"schema"`
	Text   string          `json:"text"`
	finish string
	status int
}

func (b *answersBench) valid(ctx context.Context) error {
	list, err := b.draw()
	if err != nil {
		return err
	}
	venv, err := harness.Python{Venv: b.venv, Name: "jsonschema", Imports: "jsonschema, rfc3339_validator", Pip: [][]string{{"jsonschema[format-nongpl]==4.26.0"}}}.Open(ctx)
	if err != nil {
		return err
	}
	p, url, _, err := up(ctx, b.Bench, "--model", b.model, "--max-model-len", "4096", "--data", filepath.Join(b.Dir, "data"))
	if err != nil {
		return err
	}
	defer p.Kill()
	if err := b.ask(ctx, url, list); err != nil {
		return err
	}
	var finished []bound
	refused, cut := 0, 0
	for _, a := range list {
		switch {
		case a.status == http.StatusBadRequest:
			refused++
			b.Book.Logf("%s is refused: %s", a.Name, a.Text)
		case a.status != http.StatusOK:
			return fmt.Errorf("%s: %d %s", a.Name, a.status, a.Text)
		case a.finish != "stop":
			cut++
		default:
			finished = append(finished, a)
		}
	}
	file := filepath.Join(b.Dir, "answers.jsonl")
	if err := writeLines(file, finished); err != nil {
		return err
	}
	var wrong []struct{ Name, Text, Why string }
	if _, err := b.Output(ctx, 10*time.Minute, &wrong, nil, filepath.Join(venv, "bin", "python"), "scripts/grammar/check.py", file); err != nil {
		return err
	}
	for _, w := range wrong {
		b.Sayf("%s: %s: %s", w.Name, w.Why, w.Text)
	}
	if len(finished) == 0 {
		return errors.New("no answer finished")
	}
	n := float64(len(wrong))
	return b.Add(figures.Figure{
		Name: "grammar.invalid", Value: n, Unit: "answers that are not valid", Peer: "wanted", PeerValue: 0, Runs: 1,
		Spread: fmt.Sprintf("%d finished, %d cut off at %d tokens, %d schemas refused", len(finished), cut, b.tokens, refused),
		Model:  fmt.Sprintf("%s, temperature 1, 1P1D, %d schemas of JSONSchemaBench, of each of its collections in turn, of up to %d bytes; jsonschema 4.26.0 with formats", filepath.Base(b.model), len(list), b.longest),
	})
}

// draw picks schemas at random, the same ones each time, and of each of the repository's collections in
// turn: their schemas are of different kinds.
func (b *answersBench) draw() ([]bound, error) {
	files, err := filepath.Glob(filepath.Join(b.schemas, "data/*/*.json"))
	if err != nil {
		return nil, err
	}
	rnd := rand.New(rand.NewPCG(1, 1))
	rnd.Shuffle(len(files), func(i, j int) { files[i], files[j] = files[j], files[i] })
	seen, turn := map[string]int{}, make(map[string]int, len(files)) // by collection, by file
	for _, f := range files {
		turn[f] = seen[filepath.Dir(f)]
		seen[filepath.Dir(f)]++
	}
	slices.SortStableFunc(files, func(x, y string) int { return cmp.Compare(turn[x], turn[y]) })
	var list []bound
	for _, f := range files {
		if len(list) == b.count {
			break
		}
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		if len(text) <= b.longest {
			list = append(list, bound{Name: filepath.Base(f), Schema: text})
		}
	}
	if len(list) < b.count {
		return nil, fmt.Errorf("%d schemas of %d in %s", len(list), b.count, b.schemas)
	}
	return list, nil
}

// ask fills in the answers.
func (b *answersBench) ask(ctx context.Context, url string, list []bound) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	work := make(chan int)
	var wg sync.WaitGroup
	for range b.clients {
		wg.Go(func() {
			for i := range work {
				if err := list[i].ask(ctx, url, i, b.tokens); err != nil {
					cancel(fmt.Errorf("%s: %w", list[i].Name, err))
				}
			}
		})
	}
	for i := range list {
		select {
		case work <- i:
		case <-ctx.Done():
		}
	}
	close(work)
	wg.Wait()
	return context.Cause(ctx)
}

func (a *bound) ask(ctx context.Context, url string, seed, tokens int) error {
	body, err := json.Marshal(map[string]any{
		"messages": []map[string]string{{"role": "user", "content": "Write a short JSON document with made-up values that is valid against this schema:\n" + string(a.Schema)}},
		"response_format": map[string]any{"type": "json_schema", "json_schema": map[string]any{
			"name": "answer", "schema": a.Schema,
		}},
		"temperature": 1, "seed": seed, "max_tokens": tokens,
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if a.status, a.Text = resp.StatusCode, string(said); a.status != http.StatusOK {
		return nil
	}
	var answer struct {
		Choices []struct {
			Message      struct{ Content string }
			FinishReason string `json:"finish_reason"`
		}
	}
	if err := json.Unmarshal(said, &answer); err != nil || len(answer.Choices) != 1 {
		return fmt.Errorf("%w: %s", errors.Join(err, errors.New("no choice")), said)
	}
	a.Text, a.finish = answer.Choices[0].Message.Content, answer.Choices[0].FinishReason
	return nil
}

func writeLines[T any](path string, list []T) error {
	var out bytes.Buffer
	for _, v := range list {
		if err := json.NewEncoder(&out).Encode(v); err != nil {
			return err
		}
	}
	return os.WriteFile(path, out.Bytes(), 0o644)
}
