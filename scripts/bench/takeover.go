package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// takeover measures the pause that clients see when the decode worker of their streams is killed or
// stopped, beside how long a client that asks again from scratch needs until it has the same token.
// Every stream must have the tokens of an undisturbed run.
type takeover struct {
	base
	streams, threads int
	model            string
	bodies           []string // but for max_tokens
}

// fault is a part: what happens to one of two decode workers, and when.
type fault struct {
	name   string
	signal syscall.Signal
	after  int                // answer tokens of each of its streams
	pool   string             // of each worker: for all streams on one, without a shortage. The kernel frees a dead one's before its connections end
	limits map[string]float64 // ms, by figure; 0: none
}

var faults = []fault{
	{"crash", syscall.SIGKILL, 16, "384MiB", map[string]float64{"stream.crash_pause_ms.p50": 150, "stream.crash_pause_ms.p99": 400}},
	{"at512", syscall.SIGKILL, 512, "768MiB", map[string]float64{"stream.crash_pause_ms.p50.at512": 0, "stream.crash_pause_ms.p99.at512": 0}},
	{"large", syscall.SIGKILL, 16, "4GiB", map[string]float64{"stream.crash_pause_ms.p50.4gib": 0, "stream.crash_pause_ms.p99.4gib": 0}},
	{"stop", syscall.SIGSTOP, 16, "384MiB", map[string]float64{"stream.stop_pause_ms.p99": 1500}},
}

const (
	takeoverPrompt = 256 // tokens
	takeoverRest   = 128 // tokens that a stream has behind the fault
	takeoverVictim = "decode-0"
	takenOver      = "taken over"
	askedAgain     = "asked again"
)

func (b *takeover) flags(f *flag.FlagSet) {
	f.IntVar(&b.streams, "streams", 50, "streams at once")
	f.IntVar(&b.threads, "threads", 1, "CPU threads of each worker")
}

func (b *takeover) parts() (list []part) {
	for _, f := range faults {
		list = append(list, part{f.name, func(ctx context.Context) error { return b.measure(ctx, f) }})
	}
	return append(list, part{"bystanders", b.bystanders})
}

// open makes the model and the prompts.
func (b *takeover) open(ctx context.Context) error {
	tiny, err := model.Open(ctx, "", model.Options{})
	if err != nil {
		return err
	}
	defer tiny.Close()
	c := modeltest.Stories15M()
	c.MaxPositions = 2048
	tokens, config, _ := tiny.TokenizerFiles()
	if tokens, err = enlarged(tokens, c.Vocab); err != nil {
		return err
	}
	b.model = filepath.Join(b.Dir, "model")
	r := rand.New(rand.NewPCG(1, 2))
	for i := range b.streams {
		b.bodies = append(b.bodies, bodyOf(r, takeoverPrompt, i+1))
	}
	return modeltest.WriteHF(b.model, c, modeltest.HFOptions{Seed: 1, DType: kernels.F32,
		Files: map[string][]byte{"tokenizer.json": tokens, "tokenizer_config.json": config}})
}

// bodyOf is a stream's request but for max_tokens, with a prompt of so many tokens.
func bodyOf(r *rand.Rand, prompt, seed int) string {
	ids := make([]int, prompt)
	for k := range ids {
		ids[k] = 3 + r.IntN(500)
	}
	list, _ := json.Marshal(ids) // of ints
	return fmt.Sprintf(`{"model":"model","prompt":%s,"stream":true,"ignore_eos":true,"return_token_ids":true,"temperature":1,"seed":%d`, list, seed)
}

// enlarged adds tokens to a tokenizer up to n.
func enlarged(tokenizer []byte, n int) ([]byte, error) {
	var all map[string]any
	if err := json.Unmarshal(tokenizer, &all); err != nil {
		return nil, err
	}
	kind, _ := all["model"].(map[string]any)
	vocab, ok := kind["vocab"].(map[string]any)
	if !ok {
		return nil, errors.New("the tokenizer has no vocabulary")
	}
	for i := len(vocab); i < n; i++ {
		vocab[fmt.Sprintf("word%d", i)] = i
	}
	return json.Marshal(all)
}

// measure makes a fault's figures.
func (b *takeover) measure(ctx context.Context, f fault) error {
	want, err := b.undisturbed(ctx, f)
	if err != nil {
		return fmt.Errorf("undisturbed: %w", err)
	}
	runs, err := figures.Compare(b.Sayf, b.Rounds, [2]string{takenOver, askedAgain}, func(_ int, way string) (pauses, error) {
		p, err := b.strike(ctx, f, way, want)
		if err != nil {
			err = fmt.Errorf("%s: %w", way, err)
		}
		return p, err
	})
	if err != nil {
		return err
	}
	what := map[syscall.Signal]string{syscall.SIGKILL: "kill -9", syscall.SIGSTOP: "SIGSTOP"}[f.signal]
	for _, name := range slices.Sorted(maps.Keys(f.limits)) {
		peer := "until a client that asks again from scratch has the same token"
		if limit := f.limits[name]; limit > 0 {
			peer += fmt.Sprintf("; limit %.0f ms", limit)
		}
		of := pauses.p99
		if strings.Contains(name, ".p50") {
			of = pauses.p50
		}
		figure := figures.Figure{Name: name, Unit: "ms", Peer: peer,
			Model: fmt.Sprintf("15M shape, 32,000 tokens, 2,048 positions, random f32 weights, 1P2D, %d threads and %s of KV each; %d streams, prompts of %d tokens that prefill holds; %s of one decode worker after %d answer tokens, its streams' pauses from then",
				b.threads, f.pool, b.streams, takeoverPrompt, what, f.after)}
		if err := b.Add(figures.RatiosOf(figure, runs, of)); err != nil {
			return err
		}
	}
	return nil
}

// pauses are those of a run's streams, in ms.
type pauses struct {
	all  []float64
	most float64       // between two tokens, the time before the fault included
	took time.Duration // the whole run
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (p pauses) p50() float64 { return figures.Median(p.all) }
func (p pauses) p99() float64 { return figures.Quantile(p.all, 0.99) }

func (p pauses) String() string {
	return fmt.Sprintf("%d streams of the lost worker: pauses p50 %.1f p99 %.1f, %.1f..%.1f ms; longest gap between two tokens %.1f ms; all over after %.1f s",
		len(p.all), p.p50(), p.p99(), slices.Min(p.all), slices.Max(p.all), p.most, p.took.Seconds())
}

// trio is `xpyd up` with one prefill worker, which holds all prompts, and two decode workers.
type trio struct {
	fleetAt
	p    *harness.Process
	addr string
}

func (b *takeover) start(ctx context.Context, pool string) (*trio, error) {
	data := filepath.Join(b.Dir, fmt.Sprint("takeover-", time.Now().UnixNano()))
	p, url, _, err := up(ctx, b.Bench, "--data", data, "--decode", "2", "--model", b.model, "--threads", strconv.Itoa(b.threads), "--kv-memory", pool)
	if err != nil {
		return nil, err
	}
	s := &trio{p: p, addr: strings.TrimPrefix(url, "http://")}
	if err := b.warm(ctx, s, data); err != nil {
		p.Kill()
		return nil, err
	}
	return s, nil
}

// warm waits for all three workers, and has prefill compute each prompt.
func (b *takeover) warm(ctx context.Context, s *trio, data string) error {
	if err := s.read(data); err != nil {
		return err
	}
	for _, id := range []string{"decode-0", "decode-1", "prefill-0"} {
		if err := s.p.Until(ctx, patience, func() error { return s.serves(ctx, id) }); err != nil {
			return err
		}
	}
	m, err := s.member(ctx, "prefill-0")
	if err != nil {
		return err
	}
	for _, body := range b.bodies {
		if err := s.post(ctx, m, "/v1/completions", "", strings.Replace(body, `"stream":true`, `"stream":false`, 1)+`,"max_tokens":1}`,
			func(r io.Reader, _ http.Header) error { _, err := io.Copy(io.Discard, r); return err }); err != nil {
			return err
		}
	}
	return nil
}

// serves is nil once a worker has passed the router's probe.
func (f *fleetAt) serves(ctx context.Context, id string) error {
	var all struct {
		Instances []struct {
			fleet.Member
			Probed bool `json:"probed"`
		}
	}
	if err := call(ctx, http.MethodGet, f.admin+"/admin/v1/instances", f.bearer(), "", func(r io.Reader, _ http.Header) error {
		return json.NewDecoder(r).Decode(&all)
	}); err != nil {
		return err
	}
	for i := range all.Instances {
		if m := &all.Instances[i]; m.ID == id && m.State == fleet.Live && m.Probed {
			return nil
		}
	}
	return fmt.Errorf("%s does not serve", id)
}

// flow is a stream as its client sees it.
type flow struct {
	decode string
	ids    []string
	at     []time.Time // of each
	seams  []int       // how many ids were there
}

// ask sends the i-th request for so many tokens and reads its stream; met is called at each token.
func (b *takeover) ask(addr string, i, tokens int, header string, met func(*flow)) (*flow, error) {
	return askFor(addr, fmt.Sprintf(`%s,"max_tokens":%d}`, b.bodies[i], tokens), header, met)
}

func askFor(addr, body, header string, met func(*flow)) (*flow, error) {
	f := &flow{}
	c, err := dial(addr)
	if err != nil {
		return f, err
	}
	defer c.conn.Close()
	c.r = bufio.NewReaderSize(c.conn, 1<<20) // the first event lists the prompt's ids
	req := post("/v1/completions", body)
	if err := c.send(bytes.Replace(req, []byte("\r\n"), []byte("\r\n"+header), 1), 20*time.Minute); err != nil {
		return f, err
	}
	return f, f.read(c, met)
}

func (f *flow) read(c *rawClient, met func(*flow)) error {
	for first := true; ; first = false {
		line, err := c.r.ReadSlice('\n')
		if err != nil {
			return err
		}
		if first && !bytes.Contains(line, []byte(" 200 ")) {
			return fmt.Errorf("the reply is %s", line)
		}
		name, value, _ := bytes.Cut(line, []byte(": "))
		switch {
		case bytes.EqualFold(name, []byte("x-xpyd-decode")):
			f.decode = string(bytes.TrimSpace(value))
		case len(name) == 0 && bytes.HasPrefix(value, []byte("xpyd seam")):
			f.seams = append(f.seams, len(f.ids))
		case string(name) != "data":
		case bytes.HasPrefix(value, []byte("[DONE]")):
			return nil
		case bytes.HasPrefix(value, []byte(`{"error"`)):
			return fmt.Errorf("the stream was ended: %s", bytes.TrimSpace(value))
		default:
			_, ids, _ := bytes.Cut(value, []byte(`"token_ids":[`))
			ids, _, ok := bytes.Cut(ids, []byte("]"))
			if !ok {
				return fmt.Errorf("an event without token_ids: %s", value)
			}
			for id := range bytes.SplitSeq(ids, []byte(",")) {
				if len(id) > 0 {
					f.ids, f.at = append(f.ids, string(id)), append(f.at, time.Now())
					met(f)
				}
			}
		}
	}
}

// behind is what the client has once l has repeated what it had of a stream that broke.
func (f *flow) behind(broke *flow) *flow {
	if broke == nil {
		return f
	}
	if n := len(broke.ids); len(f.ids) > n {
		return &flow{decode: broke.decode, ids: f.ids, at: append(broke.at, f.at[n:]...), seams: append(broke.seams, n)}
	}
	return broke
}

// undisturbed returns the tokens of each stream.
func (b *takeover) undisturbed(ctx context.Context, f fault) ([][]string, error) {
	s, err := b.start(ctx, f.pool)
	if err != nil {
		return nil, err
	}
	defer s.p.Kill()
	want := make([][]string, b.streams)
	var all errgroup.Group
	for i := range want {
		all.Go(func() error {
			got, err := b.ask(s.addr, i, f.after+takeoverRest, "", func(*flow) {})
			if want[i] = got.ids; err == nil && (len(got.ids) != f.after+takeoverRest || len(got.seams) > 0) {
				err = fmt.Errorf("%d tokens, %d seams", len(got.ids), len(got.seams))
			}
			return err
		})
	}
	return want, errors.Join(all.Wait(), s.p.Stop())
}

// strike runs all streams and hits the victim once each of its streams has the fault's tokens.
func (b *takeover) strike(ctx context.Context, f fault, way string, want [][]string) (p pauses, err error) {
	s, err := b.start(ctx, f.pool)
	if err != nil {
		return p, err
	}
	defer s.p.Kill()
	victim, err := s.member(ctx, takeoverVictim)
	if err != nil {
		return p, err
	}
	var mu sync.Mutex
	var at time.Time // of the fault
	begun, its, reached, furthest := 0, 0, 0, 0
	met := func(l *flow) {
		mu.Lock()
		defer mu.Unlock()
		n := len(l.ids)
		if n == 1 {
			begun++
		}
		if l.decode != takeoverVictim || !at.IsZero() {
			return
		}
		if n == 1 {
			its++
		}
		if n == f.after {
			reached++
		}
		if furthest = max(furthest, n); begun == b.streams && its > 0 && reached == its {
			at = time.Now()
			_ = syscall.Kill(victim.PID, f.signal) // that nothing happens would show
		}
	}
	header := ""
	if way == askedAgain {
		header = "x-xpyd-takeover: 0\r\n"
	}
	began := time.Now()
	var streams errgroup.Group
	flows := make([]*flow, b.streams)
	for i := range flows {
		streams.Go(func() (err error) {
			for range 100 {
				var l *flow
				if l, err = b.ask(s.addr, i, f.after+takeoverRest, header, met); err == nil && !slices.Equal(l.ids, want[i]) {
					return fmt.Errorf("stream %d of %s, %d seams, has other tokens than undisturbed:\n%q\n%q", i, l.decode, len(l.seams), l.ids, want[i])
				}
				flows[i] = l.behind(flows[i])
				if err == nil || way == takenOver {
					break
				}
				time.Sleep(10 * time.Millisecond) // a client's patience, if nobody serves now
			}
			return err
		})
	}
	if err := streams.Wait(); err != nil {
		return p, err
	}
	p.took = time.Since(began)
	for i, l := range flows {
		lost := l.decode == takeoverVictim
		if lost != (len(l.seams) == 1) || len(l.seams) > 1 {
			return p, fmt.Errorf("stream %d of %s has %d seams; its last token came %.0f ms after the fault", i, l.decode, len(l.seams), ms(l.at[len(l.at)-1].Sub(at)))
		}
		if !lost {
			continue
		}
		n := l.seams[0]
		last := l.at[n-1]
		p.most = max(p.most, ms(l.at[n].Sub(last)))
		if at.After(last) {
			last = at
		}
		p.all = append(p.all, ms(l.at[n].Sub(last)))
	}
	if len(p.all) == 0 {
		return p, errors.New("no stream was hit")
	}
	b.Book.Logf("%s, %s: the furthest of these streams was at %d tokens; pauses %.1f ms", f.name, way, furthest, p.all)
	return p, s.p.Stop()
}
