package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/xpyd/xpyd/internal/figures"
)

const (
	bystanderRate   = 20 // prompts a second
	bystanderPrompt = 64 // tokens
	bystanderWindow = 3 * time.Second
	bystanderTokens = 400 // of each stream that may be taken over: more than come in that time
)

// waited is how long prompts waited that came while streams were taken over, in ms.
type waited []float64

func (w waited) String() string {
	return fmt.Sprintf("%d prompts: first tokens after p50 %.1f, p99 %.1f ms", len(w), figures.Median(w), figures.Quantile(w, 0.99))
}

// bystanders measures first tokens of short prompts that come in the seconds after a decode worker was
// killed, and prefill has forgotten what its streams' prompts were: beside the same where nothing is killed.
func (b *takeover) bystanders(ctx context.Context) error {
	runs, err := figures.Compare(b.Sayf, b.Rounds, [2]string{"beside takeovers", "undisturbed"}, func(round int, way string) (waited, error) {
		return b.bystand(ctx, round, way != "undisturbed")
	})
	if err != nil {
		return err
	}
	f := figures.Figure{Name: "stream.bystander_ttft_ratio", Peer: "the same prompts, nothing killed; limit 1.5 times", Unit: "ms at p99",
		Model: fmt.Sprintf("15M shape, random f32 weights, 1P2D, %d threads each; %d streams with prompts of %d tokens that prefill has forgotten; %d prompts of %d tokens a second, of the %v after kill -9 of one decode worker",
			b.threads, b.streams, takeoverPrompt, bystanderRate, bystanderPrompt, bystanderWindow)}
	return b.Add(figures.RatiosOf(f, runs, func(w waited) float64 { return figures.Quantile(w, 0.99) }))
}

func (b *takeover) bystand(ctx context.Context, round int, kill bool) (waited, error) {
	s, err := b.start(ctx, "512MiB")
	if err != nil {
		return nil, err
	}
	defer s.p.Kill()
	victim, err := s.member(ctx, takeoverVictim)
	if err != nil {
		return nil, err
	}
	var begun sync.WaitGroup
	begun.Add(b.streams)
	var streams errgroup.Group
	flows := make([]*flow, b.streams)
	for i := range flows {
		streams.Go(func() (err error) {
			once := sync.OnceFunc(begun.Done)
			defer once()
			flows[i], err = b.ask(s.addr, i, bystanderTokens, "", func(f *flow) {
				if len(f.ids) == faults[0].after {
					once()
				}
			})
			return err
		})
	}
	begun.Wait()
	m, err := s.member(ctx, "prefill-0")
	if err != nil {
		return nil, err
	}
	if err := s.post(ctx, m, "/xpyd/v1/cache/flush", "", "", discard); err != nil {
		return nil, err
	}
	if kill {
		if err := syscall.Kill(victim.PID, syscall.SIGKILL); err != nil {
			return nil, err
		}
	}
	took, err := b.prompts(s.addr, uint64(round))
	s.p.Kill()
	_ = streams.Wait() // they are cut
	if seams := slices.ContainsFunc(flows, func(f *flow) bool { return len(f.seams) > 0 }); seams != kill && err == nil {
		err = fmt.Errorf("some stream was taken over: %t", seams)
	}
	return took, err
}

// prompts sends prompts at even times and returns when their first tokens came.
func (b *takeover) prompts(addr string, seed uint64) (waited, error) {
	r := rand.New(rand.NewPCG(seed, 5))
	took := make(waited, int(bystanderRate*bystanderWindow.Seconds()))
	tick := time.NewTicker(time.Second / bystanderRate)
	defer tick.Stop()
	var all errgroup.Group
	for i := range took {
		body := bodyOf(r, bystanderPrompt, i+1) + `,"max_tokens":2}`
		all.Go(func() error {
			asked := time.Now()
			f, err := askFor(addr, body, "", func(*flow) {})
			if err == nil {
				took[i] = ms(f.at[0].Sub(asked))
			}
			return err
		})
		<-tick.C
	}
	err := all.Wait()
	slices.Sort(took)
	return took, err
}
