package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// peerResults are those of all rounds that count, in milliseconds.
type peerResults struct {
	computed, peer, pool []float64
	equal, alike         int       // answers over the peer's KV that are those computed, and those of the giver over its own
	missed               int       // tries in which the fetch did not come
	path                 string    // how the taker reaches the giver
	fetch, step          []float64 // of first tokens over the peer's KV: the fetch, and the engine's part
}

// answer is one answer, and when its first token came.
type answer struct {
	text   string
	tokens []int32 // if asked for
	drawn  int
	cached int
	first  time.Duration
	step   float64 // the engine's part of it, ms
}

const answerTokens = 8

// vocabulary is that of the embedded model, which all have; the first ids are no text.
const low, vocabulary = 3, 512

// series runs rounds on workers of its own. exact: answers over the giver's KV must be
// those that the taker computes. Else they are only counted: two GPUs need not choose the
// same kernels.
func (o *peer) series(ctx context.Context, rounds int, exact bool) (*peerResults, error) {
	s, err := o.start(ctx, exact)
	defer s.close()
	if err != nil {
		return nil, err
	}
	r := &peerResults{}
	for n := range rounds + 1 { // the first one opens the connection
		if n == 1 {
			*r = peerResults{}
		}
		if err := s.round(ctx, r, uint64(n), exact); err != nil {
			return nil, fmt.Errorf("round %d: %w\n%s", n, err, harness.Logs(s.procs))
		}
		i := len(r.peer) - 1
		o.Sayf("round %d: computed %.2f ms, from the peer %.2f ms (%.4f), in its own pool %.2f ms; the fetch %.2f ms, the engine after it %.2f ms", n, r.computed[i], r.peer[i], r.peer[i]/r.computed[i], r.pool[i], r.fetch[i], r.step[i])
	}
	want := "giver cudaipc"
	if len(o.gpus) == 0 {
		want = "giver shm"
	}
	if err := s.until(ctx, func() error { // it is announced
		taker, err := s.member("taker")
		if err != nil {
			return err
		}
		if r.path = taker.KVPaths; r.path == "" {
			return errors.New("the taker does not say how it reaches the giver")
		}
		return nil
	}); err != nil {
		return nil, err
	}
	if r.path != want {
		return nil, fmt.Errorf("the taker's path is %q, want %q", r.path, want)
	}
	return r, nil
}

// fetching is how long the taker has fetched so far, in seconds.
func (s *peerSite) fetching(ctx context.Context) (sum float64, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.taker.URL+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	return sum, call(req, func(r io.Reader, _ http.Header) error {
		lines := bufio.NewScanner(r)
		for lines.Scan() {
			_, _ = fmt.Sscanf(lines.Text(), "xpyd_kvtier_peer_seconds_sum %g", &sum) // other lines have other names
		}
		return lines.Err()
	})
}

// round measures one prompt: computed by the taker, fetched by it from the giver, in
// either order, and then out of its own pool.
func (s *peerSite) round(ctx context.Context, r *peerResults, n uint64, exact bool) error {
	rng := rand.New(rand.NewPCG(n, 1))
	prompt := []int32{1}
	for len(prompt) < s.o.tokens {
		prompt = append(prompt, low+rng.Int32N(vocabulary-low))
	}
	if _, err := s.ask(ctx, s.giver, prompt, nil); err != nil {
		return err
	}
	warm, err := s.ask(ctx, s.giver, prompt, nil)
	if err != nil {
		return err
	}
	whole := (len(prompt) - 1) / 16 * 16
	if warm.cached < whole {
		return fmt.Errorf("the giver has %d tokens in its pool, want %d", warm.cached, whole)
	}
	hint := http.Header{"X-Xpyd-Kv-Peer": {fmt.Sprintf("%s %d %s %s %d", s.giver.ID, s.giver.Epoch, s.giver.URL, s.giver.KVAddr, len(prompt))}}
	before, err := s.fetching(ctx)
	if err != nil {
		return err
	}
	var computed, peer *answer
	for i := range uint64(2) {
		if i == n%2 {
			computed, err = s.cold(ctx, prompt, nil)
		} else {
			peer, err = s.fetched(ctx, r, prompt, hint, whole)
		}
		if err != nil {
			return err
		}
	}
	if computed.cached != 0 {
		return fmt.Errorf("%d tokens of what was to be computed were cached", computed.cached)
	}
	time.Sleep(s.o.rest)
	pool, err := s.ask(ctx, s.taker, prompt, nil)
	if err != nil {
		return err
	}
	same := func(a *answer) bool { return peer.text == a.text && slices.Equal(peer.tokens, a.tokens) }
	switch {
	case exact && !(same(computed) && same(warm)):
		return fmt.Errorf("the taker's answer is %q %v; the giver's %q %v, computed %q %v", peer.text, peer.tokens, warm.text, warm.tokens, computed.text, computed.tokens)
	case same(computed):
		r.equal++
	}
	if same(warm) {
		r.alike++
	}
	ms := func(a *answer) float64 { return float64(a.first) / 1e6 }
	after, err := s.fetching(ctx)
	if err != nil {
		return err
	}
	r.fetch, r.step = append(r.fetch, 1000*(after-before)), append(r.step, peer.step)
	r.computed, r.peer, r.pool = append(r.computed, ms(computed)), append(r.peer, ms(peer)), append(r.pool, ms(pool))
	return nil
}

// fetched is cold with the giver's name. A starved machine may lose sight of the giver:
// then the prompt is computed, which does not count.
func (s *peerSite) fetched(ctx context.Context, r *peerResults, prompt []int32, hint http.Header, whole int) (a *answer, err error) {
	failed := s.until(ctx, func() error {
		if a, err = s.cold(ctx, prompt, hint); err != nil {
			return nil
		}
		if a.cached < whole {
			r.missed++
			return fmt.Errorf("%d of %d tokens came from the giver", a.cached, whole)
		}
		return nil
	})
	return a, errors.Join(failed, err)
}

// cold asks a taker that has nothing, and has rested.
func (s *peerSite) cold(ctx context.Context, prompt []int32, header http.Header) (*answer, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.taker.URL+"/xpyd/v1/cache/flush", nil)
	if err != nil {
		return nil, err
	}
	s.show(req, s.taker)
	if err := call(req, func(io.Reader, http.Header) error { return nil }); err != nil {
		return nil, err
	}
	time.Sleep(s.o.rest)
	return s.ask(ctx, s.taker, prompt, header)
}

// ask streams an answer. Token ids come in exact series only: with them goes the whole
// prompt in front of the first token.
func (s *peerSite) ask(ctx context.Context, of *fleet.Member, prompt []int32, header http.Header) (*answer, error) {
	body, err := json.Marshal(map[string]any{"prompt": prompt, "max_tokens": answerTokens, "temperature": 0, "ignore_eos": true, "return_token_ids": s.exact,
		"stream": true, "stream_options": map[string]bool{"include_usage": true}})
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, of.URL+"/v1/completions", strings.NewReader(string(body)))
	if err != nil {
		return nil, err
	}
	if header != nil {
		req.Header = header.Clone()
	}
	req.Header.Set("Content-Type", "application/json")
	s.show(req, of)
	a := &answer{}
	began := time.Now()
	err = call(req, func(r io.Reader, h http.Header) error {
		if _, part, ok := strings.Cut(h.Get("Server-Timing"), "prefill;dur="); ok {
			_, _ = fmt.Sscanf(part, "%g", &a.step) // of our own worker
		}
		for lines := bufio.NewReader(r); ; {
			line, err := lines.ReadString('\n')
			if errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return err
			}
			if !strings.HasPrefix(line, "data: {") {
				continue
			}
			if a.first == 0 {
				a.first = time.Since(began)
			}
			var e event
			if err := json.Unmarshal([]byte(line[len("data: "):]), &e); err != nil {
				return err
			}
			a.take(&e)
		}
	})
	if err == nil && a.drawn != answerTokens {
		err = fmt.Errorf("an answer of %d tokens", a.drawn)
	}
	return a, err
}

// event is what is read of a stream's event.
type event struct {
	Choices []struct {
		Text     string
		TokenIDs []int32 `json:"token_ids"`
	}
	Usage *struct {
		Completion int `json:"completion_tokens"`
		Details    struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

func (a *answer) take(e *event) {
	for _, c := range e.Choices {
		a.text += c.Text
		a.tokens = append(a.tokens, c.TokenIDs...)
	}
	if e.Usage != nil {
		a.drawn, a.cached = e.Usage.Completion, e.Usage.Details.Cached
	}
}
