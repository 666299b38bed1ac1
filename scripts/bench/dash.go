package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"time"

	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// dash measures what an open page of the dashboard costs the router: processor time of the same streams with a page that asks as
// the fleet's view does, each second, and without.
type dash struct {
	*idle
	each time.Duration
}

func (b *dash) flags(f *flag.FlagSet) {
	f.IntVar(&b.requests, "requests", 1000, "before the clock is looked at again")
	f.DurationVar(&b.each, "each", 6*time.Second, "of load, with the page and without, in a round")
}

func (b *dash) parts() []part { return []part{{"cpu", b.cpu}} }

func (b *dash) open(ctx context.Context) error { return b.engines(ctx) }

// cpu compares the processor time per stream. Which comes first alternates; both are of one process.
func (b *dash) cpu(ctx context.Context) error {
	binary, err := b.Binary(ctx)
	if err != nil {
		return err
	}
	o, err := b.start(ctx, binary, "")
	if err != nil {
		return err
	}
	defer o.Kill()
	req := post("/v1/completions", completion(words(2<<10), true, 16, ""))
	if _, err := drive(o.Addr, 32, 6*b.requests, req); err != nil { // warm
		return err
	}
	page := &openPage{admin: o.admin}
	if err := page.signIn(ctx, o.token); err != nil {
		return err
	}
	us := map[bool][]float64{}
	for round := range b.Rounds {
		asked := 0
		for turn := range 2 {
			open := (turn+round)%2 == 0
			took, polls, err := b.streams(ctx, o.Process, page, open, req)
			if err != nil {
				return err
			}
			us[open] = append(us[open], took)
			asked += polls
		}
		b.Sayf("round %d: with a page %.2f, without %.2f us of processor a stream; the page asked %d times", round, us[true][round], us[false][round], asked)
	}
	return b.add("dash.cpu_ratio", "us", fmt.Sprintf("mock engines that send a frame an event, 2 KB prompt, 16 tokens, c=32; a page that asks as the fleet's view does, for %v of each round", b.each),
		"no page", us[true], us[false], false)
}

// streams drives the router for some time, and returns microseconds of processor a stream, and how often the page asked.
func (b *dash) streams(ctx context.Context, p *harness.Process, page *openPage, open bool, req []byte) (us float64, polls int, err error) {
	asks, stop := context.WithCancel(ctx)
	defer stop()
	asked := make(chan error, 1)
	n, before, began := 0, p.CPU(), time.Now()
	if open {
		go func() { asked <- page.watch(asks, &polls) }()
	} else {
		asked <- nil
	}
	for err == nil && time.Since(began) < b.each {
		_, err = drive(p.Addr, 32, b.requests, req)
		n += b.requests
	}
	used := p.CPU() - before
	stop()
	if failed := <-asked; err == nil {
		err = failed
	}
	return float64(used.Nanoseconds()) / 1e3 / float64(max(n, 1)), polls, err
}

// openPage asks as router/console/dashboard/store.js does while the fleet's view is open, in a browser's session.
type openPage struct {
	admin       string
	client      *http.Client
	key         string
	point, seen int
	newest      string
}

func (p *openPage) signIn(ctx context.Context, token string) error {
	jar, err := cookiejar.New(nil)
	if err != nil {
		return err
	}
	p.client = &http.Client{Jar: jar, Timeout: 10 * time.Second}
	body, err := json.Marshal(map[string]string{"token": token})
	if err != nil {
		return err
	}
	var said struct{ Key string }
	if err := p.ask(ctx, http.MethodPost, "/dashboard/session", body, &said); err != nil {
		return err
	}
	p.key = said.Key
	return nil
}

func (p *openPage) ask(ctx context.Context, method, path string, body []byte, into any) error {
	req, err := http.NewRequestWithContext(ctx, method, p.admin+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("X-Xpyd-Session", p.key)
	if method == http.MethodPost {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s %.200s", path, resp.Status, text)
	}
	if err == nil && into != nil {
		err = json.Unmarshal(text, into)
	}
	return err
}

// watch asks each second until ctx ends, and counts how often.
func (p *openPage) watch(ctx context.Context, polls *int) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for ; ; *polls++ {
		if err := p.poll(ctx, *polls); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (p *openPage) poll(ctx context.Context, n int) error {
	var at struct{ Next int }
	if err := p.ask(ctx, http.MethodGet, fmt.Sprintf("/admin/v1/history?after=%d", p.point), nil, &at); err != nil {
		return err
	}
	p.point = at.Next
	if err := p.ask(ctx, http.MethodGet, fmt.Sprintf("/admin/v1/events?after=%d", p.seen), nil, &at); err != nil {
		return err
	}
	p.seen = at.Next
	if err := p.ask(ctx, http.MethodGet, "/admin/v1/instances", nil, nil); err != nil || n%2 != 0 {
		return err
	}
	var list struct {
		Requests []struct{ Over string }
	}
	if err := p.ask(ctx, http.MethodGet, "/admin/v1/requests?after="+url.QueryEscape(p.newest), nil, &list); err != nil {
		return err
	}
	for _, r := range list.Requests {
		p.newest = max(p.newest, r.Over)
	}
	return p.ask(ctx, http.MethodGet, "/admin/v1/cache", nil, nil)
}
