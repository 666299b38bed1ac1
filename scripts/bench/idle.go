package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// idle measures what it costs the router to be able to take streams over, while nothing goes wrong:
// processor time and memory, with mock engines that say which tokens they send.
type idle struct{ *builds }

func (b *idle) flags(f *flag.FlagSet) {
	f.StringVar(&b.before, "base", "", "an earlier commit to compare with; without it only takeover: false is")
	f.IntVar(&b.requests, "requests", 6000, "to each router in a round")
}

func (b *idle) parts() []part { return []part{{"cost", b.cost}, {"bytes", b.bytes}} }

func (b *idle) open(ctx context.Context) error {
	if b.before != "" && b.Wants("cost") {
		if err := b.checkOut(ctx); err != nil {
			return err
		}
		b.routerBefore = filepath.Join(b.Dir, "xpyd-before")
		if err := harness.Build(ctx, b.tree, b.routerBefore, "0"); err != nil {
			return err
		}
	}
	return b.engines(ctx)
}

// own is a router in front of two mocks that it takes for workers of our own.
type own struct {
	fleetAt
	*harness.Process
}

// start starts a build's router with some more settings.
func (b *idle) start(ctx context.Context, binary, settings string) (*own, error) {
	addr, err := harness.FreeAddr()
	if err != nil {
		return nil, err
	}
	admin, err := harness.FreeAddr()
	if err != nil {
		return nil, err
	}
	data, err := os.MkdirTemp(b.Dir, "data")
	if err != nil {
		return nil, err
	}
	conf, err := b.file(filepath.Base(data)+".yaml", fmt.Sprintf("listen: %s\ndata: %s\nadmin_listen: %s\nlimits: {max_in_flight: 20000}\nmax_conns: 20000\n%s\n", addr, data, admin, settings))
	if err != nil {
		return nil, err
	}
	p, err := b.Listening(ctx, addr, harness.Spec{Name: "xpyd", Argv: []string{binary, "router", "--config", conf}, CPU: proxyCPU})
	if err != nil {
		return nil, err
	}
	o := &own{fleetAt: fleetAt{admin: "http://" + admin}, Process: p}
	if err = p.Until(ctx, 30*time.Second, func() error { return listens(admin) }); err == nil {
		err = o.join(ctx, data, b.p, b.d)
	}
	if err != nil {
		p.Kill()
		return nil, err
	}
	return o, nil
}

func listens(addr string) error {
	c, err := net.Dial("tcp", addr)
	if err == nil {
		err = c.Close()
	}
	return err
}

// join adds the mocks, and waits until a request has gone through both.
func (o *own) join(ctx context.Context, data, prefill, decode string) error {
	token, err := os.ReadFile(filepath.Join(data, "admin-token"))
	if err != nil {
		return err
	}
	o.token = strings.TrimSpace(string(token))
	for role, addr := range map[fleet.Role]string{fleet.Prefill: prefill, fleet.Decode: decode} {
		body, err := json.Marshal(fleet.Instance{ID: string(role), Role: role, URL: "http://" + addr, KVAddr: addr, Model: "m", MaxBatch: 100_000, MaxModelLen: 131_072})
		if err != nil {
			return err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, o.admin+"/admin/v1/instances", bytes.NewReader(body))
		if err != nil {
			return err
		}
		req.Header = o.bearer()
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		said, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusCreated {
			return fmt.Errorf("add %s: %s %s", role, resp.Status, said)
		}
	}
	return o.Until(ctx, 30*time.Second, func() error { return completes(o.Addr) })
}

// of is a way to run a build's router.
func (b *idle) of(name, binary, settings string) target {
	return target{name: name, start: func(ctx context.Context) (*harness.Process, error) {
		o, err := b.start(ctx, binary, settings)
		if err != nil {
			return nil, err
		}
		return o.Process, nil
	}}
}

// cost compares the processor time per stream.
func (b *idle) cost(ctx context.Context) error {
	now, err := b.Binary(ctx)
	if err != nil {
		return err
	}
	const on, off, before = "on", "takeover: false", "before"
	ways := []target{b.of(on, now, ""), b.of(off, now, off)}
	if b.routerBefore != "" {
		ways = append(ways, b.of(before, b.routerBefore, ""))
	}
	req := post("/v1/completions", completion(words(2<<10), true, 16, ""))
	n := max(b.requests/turns, 1)
	us := map[string][]float64{}
	for round := range b.Rounds {
		used, err := b.alternate(ctx, ways, round, n, req)
		if err != nil {
			return err
		}
		line := ""
		for _, w := range ways {
			us[w.name] = append(us[w.name], float64(used[w.name].Nanoseconds())/1e3/float64(turns*n))
			line += fmt.Sprintf(", %s %.2f", w.name, us[w.name][round])
		}
		b.Sayf("cost round %d: us of processor a stream%s; %d streams each in %d turns", round, line, turns*n, turns)
	}
	const about = "mock engines that send a frame an event, 2 KB prompt, 16 tokens, c=32"
	if err := b.add("stream.idle_cost_ratio.off", "us", about, off, us[on], us[off], false); err != nil || b.routerBefore == "" {
		return err
	}
	return b.add("stream.idle_cost_ratio", "us", about, b.earlier(), us[on], us[before], false)
}

// bytes compares the router's heap while streams are open, with takeovers and without.
func (b *idle) bytes(ctx context.Context) error {
	const prompt, answer, count = 1000, 500, 400
	const limit = 2<<10 + 4*(prompt+answer)
	now, err := b.Binary(ctx)
	if err != nil {
		return err
	}
	req := post("/v1/completions", completion(words(4*prompt), true, 2*answer, holdPrefix+strconv.Itoa(answer)))
	var more, with []float64
	for round := range min(b.Rounds, 5) {
		var each [2]float64
		for i, settings := range []string{"", "takeover: false"} {
			if each[i], err = b.heapOf(ctx, now, settings, count, answer, req); err != nil {
				return err
			}
		}
		b.Sayf("bytes round %d: %.0f of heap a stream, with takeover: false %.0f", round, each[0], each[1])
		with, more = append(with, each[0]), append(more, each[0]-each[1])
	}
	f := figures.Figure{Name: "stream.idle_bytes", Unit: "bytes of heap a stream", Peer: "limit: 2 KiB, and 4 bytes a token",
		Model: fmt.Sprintf("mock engines that send a frame an event, %d open streams, prompts of %d bytes for %d tokens, %d tokens answered; less the same with takeover: false", count, 4*prompt, prompt, answer)}
	limits := make([]float64, len(more))
	for i := range limits {
		limits[i] = limit
	}
	f = f.Ratios(more, limits)
	f.Spread += fmt.Sprintf("; %.0f with what every stream has", figures.Median(with))
	return b.Add(f)
}

// heapOf is the heap that an open stream takes once so many events of it have come.
func (b *idle) heapOf(ctx context.Context, binary, settings string, count, events int, req []byte) (float64, error) {
	o, err := b.start(ctx, binary, settings)
	if err != nil {
		return 0, err
	}
	defer o.Kill()
	if _, err := drive(o.Addr, 32, 1000, post("/v1/completions", completion(words(2<<10), true, 16, ""))); err != nil { // memory that stays
		return 0, err
	}
	before, err := o.heap(ctx)
	if err != nil {
		return 0, err
	}
	conns := make([]net.Conn, count)
	defer func() {
		for _, c := range conns {
			if c != nil {
				c.Close()
			}
		}
	}()
	var all errgroup.Group
	all.SetLimit(16) // the others have what they wait for
	for i := range conns {
		all.Go(func() error {
			c, err := dial(o.Addr)
			if err != nil {
				return err
			}
			conns[i] = c.conn
			return c.events(req, events)
		})
	}
	if err := all.Wait(); err != nil {
		return 0, err
	}
	after, err := o.heap(ctx)
	return (after - before) / float64(count), err
}

// events reads so many events of a stream.
func (c *rawClient) events(req []byte, n int) error {
	if err := c.send(req, time.Minute); err != nil {
		return err
	}
	for n > 0 {
		line, err := c.r.ReadSlice('\n')
		if err != nil {
			return err
		}
		if bytes.HasPrefix(line, []byte("data: {\"id\"")) {
			n--
		} else if bytes.HasPrefix(line, []byte("data: ")) || bytes.HasPrefix(line, []byte("HTTP/1.1 ")) && !bytes.Contains(line, []byte(" 200 ")) {
			said := string(line)
			rest, _ := c.r.Peek(c.r.Buffered()) // cannot fail
			return fmt.Errorf("the router says %s%s", said, rest)
		}
	}
	return nil
}

// heap is what lives on the router's heap.
func (o *own) heap(ctx context.Context) (size float64, err error) {
	for range 2 { // pools lose what they have in the second collection
		var text []byte
		if err := call(ctx, http.MethodGet, o.admin+"/debug/pprof/heap?gc=1&debug=1", o.bearer(), "", func(r io.Reader, _ http.Header) (err error) {
			text, err = io.ReadAll(r)
			return err
		}); err != nil {
			return 0, err
		}
		_, after, _ := strings.Cut(string(text), "\n# HeapAlloc = ")
		line, _, _ := strings.Cut(after, "\n")
		if size, err = strconv.ParseFloat(line, 64); err != nil {
			return 0, fmt.Errorf("the heap profile: %w", err)
		}
	}
	return size, nil
}
