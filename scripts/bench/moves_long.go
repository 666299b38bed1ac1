package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/xpyd/xpyd/internal/figures"
)

const (
	longOthers = 4                     // streams of the decode that a stream moves to
	longRest   = 48                    // tokens that a stream has behind its move, or its worker's death
	longPool   = 6 << 30 / (128 << 10) // tokens of the 8B shape in a GPU's pool; host memory has twice as many
)

// size names a context in a figure.
func (b *moves) size() string {
	if b.context >= 1024 {
		return fmt.Sprintf("%dk", b.context/1024)
	}
	return fmt.Sprint(b.context)
}

// single is one stream that moves while others go on where it moves to.
type single struct {
	pause, step  float64 // ms: the latter of the decode that it moves to
	before, then float64 // ms: the others' mean gap before the order, and from it to the stream's next token
}

// longMoves moves one stream at a time, of a long prompt, to a decode that tells others.
func (b *moves) longMoves(ctx context.Context) error {
	var extra, step, then, before []float64
	for round := range b.Rounds {
		list, err := b.longRound(ctx)
		if err != nil {
			return err
		}
		for _, m := range list {
			extra, step = append(extra, m.pause-m.step), append(step, m.step)
			then, before = append(then, m.then), append(before, m.before)
		}
		b.Sayf("round %d: %d moves, pause %.2f ms beyond a step of %.2f; the others' gaps %.2f ms, before %.2f", round+1, len(list),
			figures.Median(extra), figures.Median(step), figures.Median(then), figures.Median(before))
	}
	what := fmt.Sprintf("%s; a stream of %d prompt tokens moves to a decode with %d others", b.about(), b.context, longOthers)
	pause := figures.Figure{Name: "stream.move_pause_extra_ms." + b.size(), Unit: "ms", Peer: "the median step of the decode that it moves to; limit: 10 ms beyond it", Model: what}
	ratio := figures.Figure{Name: "stream.move_itl_ratio", Unit: "x", Peer: "the others' mean gap before; limit 1.05", Model: what}.Ratios(then, before)
	ratio.Spread += fmt.Sprintf("; %.4g ms, before %.4g", ratio.Value, ratio.PeerValue)
	ratio.Value, ratio.PeerValue = ratio.Ratio, 1
	return b.Add(pause.Ratios(extra, step), ratio)
}

func (b *moves) longRound(ctx context.Context) (list []single, err error) {
	s, err := b.start(ctx, longOthers+b.each, b.context)
	if err != nil {
		return nil, err
	}
	defer s.p.Kill()
	stays := `{"wait_only":true}`
	if err := s.order(ctx, "decode-0", "drain", stays); err != nil {
		return nil, err
	}
	// The others have as many tokens to come as there may be, and are cut at the end.
	var mu sync.Mutex
	var at []time.Time // of all the others' gaps' ends, and their lengths
	var gaps []float64
	var others errgroup.Group
	var begun sync.WaitGroup
	begun.Add(longOthers)
	for i := range longOthers {
		others.Go(func() error {
			once := sync.OnceFunc(begun.Done)
			defer once()
			_, err := b.ask(s.addr, i, b.positions-b.context-1, "", func(f *flow) {
				if n := len(f.at); n > 1 {
					mu.Lock()
					at, gaps = append(at, f.at[n-1]), append(gaps, ms(f.at[n-1].Sub(f.at[n-2])))
					mu.Unlock()
				}
				if len(f.at) == moveBegun {
					once()
				}
			})
			return err
		})
	}
	begun.Wait()
	within := func(from, to time.Time) (list []float64) {
		mu.Lock()
		defer mu.Unlock()
		for i := range at {
			if at[i].After(from) && !at[i].After(to) {
				list = append(list, gaps[i])
			}
		}
		return list
	}
	for i := range b.each {
		if err := errors.Join(s.order(ctx, "decode-0", "undrain", ""), s.p.Until(ctx, patience, func() error { // once the other serves
			return s.order(ctx, "decode-1", "drain", stays)
		})); err != nil {
			return nil, err
		}
		m, err := b.moveOne(ctx, s, longOthers+i, within)
		if err != nil {
			return nil, fmt.Errorf("move %d: %w", i+1, err)
		}
		list = append(list, m)
	}
	s.p.Kill()
	_ = others.Wait() // they are cut
	return list, nil
}

// moveOne has decode-0 tell a stream, and then drains it; within returns the others' gaps.
func (b *moves) moveOne(ctx context.Context, s *site, i int, within func(from, to time.Time) []float64) (m single, err error) {
	ready, drained := make(chan struct{}), make(chan error, 1)
	once := sync.OnceFunc(func() { close(ready) })
	var began time.Time
	go func() {
		<-ready
		began = time.Now()
		drained <- s.order(ctx, "decode-0", "drain", "")
	}()
	lead := 2 * moveBegun
	var undrained error
	f, err := b.ask(s.addr, i, lead+longRest, "", func(f *flow) {
		if len(f.ids) == moveBegun {
			undrained = s.order(ctx, "decode-1", "undrain", "")
		}
		if len(f.ids) == lead {
			once()
		}
	})
	once()
	if err := errors.Join(err, undrained, <-drained); err != nil {
		return m, err
	}
	if f.decode != "decode-0" || len(f.seams) != 1 {
		return m, fmt.Errorf("%d seams in a stream of %s", len(f.seams), f.decode)
	}
	n := f.seams[0]
	before, then := within(f.at[moveBegun], began), within(began, f.at[n])
	if len(before) == 0 || len(then) == 0 {
		return m, errors.New("the others have no token before or during the move")
	}
	pause := max(f.at[n].Sub(f.at[n-1]), f.at[n+1].Sub(f.at[n])) // who goes on may skip a step
	return single{pause: ms(pause), step: figures.Median(before), before: mean(before), then: mean(then)}, nil
}

func mean(v []float64) float64 {
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

// longTakeovers kills the decode of a stream with a long prompt: prefill still has the prompt's KV, or
// has to compute it. Beside that is a fresh prompt's first token.
func (b *moves) longTakeovers(ctx context.Context) error {
	s, err := b.start(ctx, 3*b.Rounds, b.context)
	if err != nil {
		return err
	}
	defer s.p.Kill()
	var pauses [2][]float64
	var fresh []float64
	next := 0
	for round := range b.Rounds {
		for i, flushed := range []bool{false, true} {
			pause, first, err := b.killOne(ctx, s, next, flushed)
			if err != nil {
				return fmt.Errorf("round %d: %w", round+1, err)
			}
			next++
			pauses[i] = append(pauses[i], pause)
			if !flushed {
				fresh = append(fresh, first)
			}
			b.Sayf("round %d, prefill has the prompt: %t: %.1f ms; its first token had taken %.1f ms", round+1, !flushed, pause, first)
		}
	}
	what := fmt.Sprintf("%s; kill -9 of the decode of a stream of %d prompt and %d answer tokens", b.about(), b.context, 2*moveBegun)
	for i, name := range []string{"hit", "computed"} {
		f := figures.Figure{Name: fmt.Sprintf("stream.takeover_ms.%s_%s", b.size(), name), Unit: "ms", Peer: "a fresh prompt's first token", Model: what}
		if err := b.Add(f.Ratios(pauses[i], fresh)); err != nil {
			return err
		}
	}
	return s.p.Stop()
}

// killOne kills the decode of the i-th stream. flushed: nobody has its prompt then. Otherwise prefill
// has, on a GPU in host memory alone, as other prompts have come since.
func (b *moves) killOne(ctx context.Context, s *site, i int, flushed bool) (pause, first float64, err error) {
	if err := s.serve(ctx, "decode-0", "decode-1"); err != nil {
		return 0, 0, err
	}
	tokens, prompts := 2*moveBegun+longRest, 0
	if b.device == "cuda" && !flushed {
		tokens, prompts = tokens+1000, longPool/b.context+1
	}
	var at time.Time
	var all errgroup.Group
	asked := time.Now()
	f, err := b.ask(s.addr, i, tokens, "", func(f *flow) {
		if len(f.ids) != 2*moveBegun {
			return
		}
		all.Go(func() error {
			victim, err := s.member(ctx, f.decode)
			if err != nil {
				return err
			}
			for k := range prompts {
				h := http.Header{"Content-Type": {"application/json"}}
				body := strings.Replace(b.body(1000+prompts*i+k, b.context), `"stream":true`, `"stream":false`, 1) + `,"max_tokens":1}`
				if err := call(ctx, http.MethodPost, "http://"+s.addr+"/v1/completions", h, body, discard); err != nil {
					return err
				}
			}
			if flushed {
				if err := s.flush(ctx); err != nil {
					return err
				}
			}
			at = time.Now()
			return syscall.Kill(victim.PID, syscall.SIGKILL)
		})
	})
	if err := errors.Join(err, all.Wait()); err != nil {
		return 0, 0, err
	}
	if len(f.seams) != 1 {
		return 0, 0, fmt.Errorf("%d seams", len(f.seams))
	}
	n := f.seams[0]
	return ms(f.at[n].Sub(slices.MaxFunc([]time.Time{at, f.at[n-1]}, time.Time.Compare))), ms(f.at[0].Sub(asked)), nil
}

func discard(r io.Reader, _ http.Header) error {
	_, err := io.Copy(io.Discard, r)
	return err
}

// flush has all workers forget what they have cached.
func (s *site) flush(ctx context.Context) error {
	var all errgroup.Group
	for _, id := range []string{"prefill-0", "decode-0", "decode-1"} {
		all.Go(func() error {
			m, err := s.member(ctx, id)
			if err != nil {
				return err
			}
			return s.post(ctx, m, "/xpyd/v1/cache/flush", "", "", discard)
		})
	}
	return all.Wait()
}
