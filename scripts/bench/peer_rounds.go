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

// peerResults are the results of the rounds that count; times are in milliseconds.
type peerResults struct {
	computed, peer, pool []float64 // first tokens
	fetch, step          []float64 // of peer: the fetch, and the engine's part
	equal, alike         int       // replies over the peer's KV equal to the computed one, to the giver's from its own pool
	missed               int       // tries in which the fetch did not come
	path                 string    // how the taker reaches the giver
}

// reply is a completion with the time of its first token.
type reply struct {
	text   string
	tokens []int32 // in exact series
	drawn  int
	cached int
	first  float64 // ms
	step   float64 // the engine's part of it, ms
}

func (a *reply) equal(b *reply) bool { return a.text == b.text && slices.Equal(a.tokens, b.tokens) }

const answerTokens = 8

// All models have the embedded model's vocabulary, whose first ids are no text.
const low, vocabulary = 3, 512

// series runs rounds on fresh workers. With exact, replies over the giver's KV must equal those
// that the taker computes. Otherwise equal ones are only counted, since two GPUs may choose
// different kernels.
func (o *peer) series(ctx context.Context, rounds int, exact bool) (*peerResults, error) {
	s, err := o.startSite(ctx, exact)
	defer s.close()
	if err != nil {
		return nil, err
	}
	r := &peerResults{}
	for n := range rounds + 1 { // round 0 opens the connection
		if n == 1 {
			*r = peerResults{}
		}
		if err := s.round(ctx, r, uint64(n), exact); err != nil {
			return nil, fmt.Errorf("round %d: %w\n%s", n, err, harness.Logs(s.procs...))
		}
		i := len(r.peer) - 1
		o.Sayf("round %d: computed %.2f ms, from the peer %.2f ms (%.4f), in its own pool %.2f ms; the fetch %.2f ms, the engine after it %.2f ms", n, r.computed[i], r.peer[i], r.peer[i]/r.computed[i], r.pool[i], r.fetch[i], r.step[i])
	}
	if r.path = "giver cudaipc"; len(o.gpus) == 0 {
		r.path = "giver shm"
	}
	return r, s.until(ctx, func() error { // it takes a while to be announced
		taker, err := s.member(ctx, "taker")
		if err == nil && taker.KVPaths != r.path {
			err = fmt.Errorf("the taker's path is %q, want %q", taker.KVPaths, r.path)
		}
		return err
	})
}

// fetching is how long the taker has spent on fetches so far, in seconds.
func (s *peerSite) fetching(ctx context.Context) (sum float64, err error) {
	err = call(ctx, http.MethodGet, s.taker.URL+"/metrics", nil, "", func(r io.Reader, _ http.Header) error {
		lines := bufio.NewScanner(r)
		for lines.Scan() {
			_, _ = fmt.Sscanf(lines.Text(), "xpyd_kvtier_peer_seconds_sum %g", &sum) // other lines have other names
		}
		return lines.Err()
	})
	return sum, err
}

// round measures one prompt at the taker: computed and fetched from the giver, in either order,
// and then from its own pool.
func (s *peerSite) round(ctx context.Context, r *peerResults, n uint64, exact bool) error {
	rng := rand.New(rand.NewPCG(n, 1))
	prompt := []int32{1}
	for len(prompt) < s.o.tokens {
		prompt = append(prompt, low+rng.Int32N(vocabulary-low))
	}
	var warm *reply
	for range 2 { // computed, then from its pool
		var err error
		if warm, err = s.ask(ctx, s.giver, prompt, ""); err != nil {
			return err
		}
	}
	whole := (len(prompt) - 1) / 16 * 16
	if warm.cached < whole {
		return fmt.Errorf("the giver has %d tokens in its pool, want %d", warm.cached, whole)
	}
	hint := fmt.Sprintf("%s %d %s %s %d", s.giver.ID, s.giver.Epoch, s.giver.URL, s.giver.KVAddr, len(prompt))
	before, err := s.fetching(ctx)
	if err != nil {
		return err
	}
	var computed, peer *reply
	for i := range uint64(2) {
		if i == n%2 {
			computed, err = s.cold(ctx, prompt, "")
		} else {
			peer, err = s.fetched(ctx, r, prompt, hint, whole)
		}
		if err != nil {
			return err
		}
	}
	if computed.cached != 0 {
		return fmt.Errorf("%d tokens were cached, want none", computed.cached)
	}
	time.Sleep(s.o.rest)
	pool, err := s.ask(ctx, s.taker, prompt, "")
	if err != nil {
		return err
	}
	if exact && !(peer.equal(computed) && peer.equal(warm)) {
		return fmt.Errorf("the taker's tokens are %q %v; the giver's %q %v, computed %q %v", peer.text, peer.tokens, warm.text, warm.tokens, computed.text, computed.tokens)
	}
	if peer.equal(computed) {
		r.equal++
	}
	if peer.equal(warm) {
		r.alike++
	}
	after, err := s.fetching(ctx)
	if err != nil {
		return err
	}
	r.fetch, r.step = append(r.fetch, 1000*(after-before)), append(r.step, peer.step)
	r.computed, r.peer, r.pool = append(r.computed, computed.first), append(r.peer, peer.first), append(r.pool, pool.first)
	return nil
}

// fetched is cold with a hint that names the giver. A starved machine may lose sight of the
// giver and compute the prompt, which does not count.
func (s *peerSite) fetched(ctx context.Context, r *peerResults, prompt []int32, hint string, whole int) (a *reply, err error) {
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

// cold asks a taker whose cache is flushed and whose GPU has rested.
func (s *peerSite) cold(ctx context.Context, prompt []int32, hint string) (*reply, error) {
	if err := s.post(ctx, s.taker, "/xpyd/v1/cache/flush", "", "", func(io.Reader, http.Header) error { return nil }); err != nil {
		return nil, err
	}
	time.Sleep(s.o.rest)
	return s.ask(ctx, s.taker, prompt, hint)
}

// ask streams a completion. Only exact series ask for token ids, since they put the whole
// prompt in front of the first token.
func (s *peerSite) ask(ctx context.Context, of *fleet.Member, prompt []int32, hint string) (*reply, error) {
	body, err := json.Marshal(map[string]any{"prompt": prompt, "max_tokens": answerTokens, "temperature": 0, "ignore_eos": true, "return_token_ids": s.exact,
		"stream": true, "stream_options": map[string]bool{"include_usage": true}})
	if err != nil {
		return nil, err
	}
	a := &reply{}
	began := time.Now()
	err = s.post(ctx, of, "/v1/completions", hint, string(body), func(r io.Reader, h http.Header) error {
		_, part, _ := strings.Cut(h.Get("Server-Timing"), "prefill;dur=")
		_, _ = fmt.Sscanf(part, "%g", &a.step) // 0 if absent
		lines := bufio.NewScanner(r)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			data, ok := strings.CutPrefix(lines.Text(), "data: ")
			if !ok || data == "[DONE]" {
				continue
			}
			if a.first == 0 {
				a.first = time.Since(began).Seconds() * 1e3
			}
			var e event
			if err := json.Unmarshal([]byte(data), &e); err != nil {
				return err
			}
			a.addEvent(&e)
		}
		return lines.Err()
	})
	if err == nil && a.drawn != answerTokens {
		err = fmt.Errorf("%d tokens, want %d", a.drawn, answerTokens)
	}
	return a, err
}

// event is the part of a stream's event that is read.
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

func (a *reply) addEvent(e *event) {
	for _, c := range e.Choices {
		a.text += c.Text
		a.tokens = append(a.tokens, c.TokenIDs...)
	}
	if e.Usage != nil {
		a.drawn, a.cached = e.Usage.Completion, e.Usage.Details.Cached
	}
}
