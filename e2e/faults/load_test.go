package faults

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
)

// TestMain lets more tests run side by side than there are processors: most of
// their time they wait for what follows a fault.
func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == strconv.Itoa(runtime.GOMAXPROCS(0)) {
		_ = f.Value.Set("4") // a number, which it takes
	}
	os.Exit(cluster.Main(m))
}

// ask is one request and the text that it must be answered with.
type ask struct {
	path, body string
	want       string
}

// asks makes n different requests for stories260k: greedy and seeded, streamed
// and whole, completions and chat-sized ones; two of three write long texts,
// the third reads a long prompt. The prefix cache is kept out of a third, so
// that prefill has work whenever a fault comes.
func asks(n int) []*ask {
	r := rand.New(rand.NewPCG(7, 7))
	words := strings.Fields("Once upon a time there was a little dog who liked to play in the park with Lily and her mom They said hello big red ball happy sad tree")
	text := func(n int) string {
		out := make([]string, n)
		for i := range out {
			out[i] = words[r.IntN(len(words))]
		}
		return strings.Join(out, " ")
	}
	var out []*ask
	for i := range n {
		prompt, tokens := text(1+r.IntN(5)), 300+r.IntN(150)
		if i%3 == 2 {
			prompt, tokens = text(120), 60
		}
		sampling := `"temperature":0`
		if i%2 == 1 {
			sampling = fmt.Sprintf(`"temperature":0.9,"top_p":0.95,"seed":%d`, i)
		}
		out = append(out, &ask{path: "/v1/completions",
			body: fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":%d,"ignore_eos":true,"stream":%v,%s`, prompt, tokens, i%5 != 0, sampling)})
	}
	return out
}

// promptAsks makes n requests that are mostly prompt.
func promptAsks(n int) []*ask {
	r := rand.New(rand.NewPCG(8, 8))
	var out []*ask
	for i := range n {
		ids := make([]string, 150+r.IntN(100))
		for k := range ids {
			ids[k] = fmt.Sprint(3 + r.IntN(500))
		}
		out = append(out, &ask{path: "/v1/completions",
			body: fmt.Sprintf(`{"model":"medium","prompt":[%s],"max_tokens":%d,"ignore_eos":true,"stream":%v,"temperature":0.7,"seed":%d`,
				strings.Join(ids, ","), 8+r.IntN(16), i%3 != 0, i)})
	}
	return out
}

// send does the request once; salt keeps it from the prefix cache.
func (a *ask) send(ctx context.Context, client *http.Client, url, salt string) *cluster.Reply {
	body := a.body + "}"
	if salt != "" {
		body = fmt.Sprintf(`%s,"cache_salt":%q}`, a.body, salt)
	}
	return cluster.Post(ctx, client, url+a.path, body)
}

// record fills in what each request is answered with while nothing happens.
func record(t *testing.T, r *cluster.Router, list []*ask) {
	t.Helper()
	client := cluster.NewClient(t)
	var wg sync.WaitGroup
	slots := make(chan struct{}, 8)
	for _, a := range list {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			got := a.send(t.Context(), client, r.URL, "")
			if !got.Good() || got.Text == "" {
				t.Errorf("undisturbed: %v\n%s", got, a.body)
			}
			a.want = got.Text
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// recorded is n requests with their right answers.
func recorded(t *testing.T, r *cluster.Router, n int) []*ask {
	t.Helper()
	list := asks(n)
	record(t, r, list)
	return list
}

// load keeps streams requests running until stop.
type load struct {
	inFlight atomic.Int64
	client   *http.Client
	quit     chan struct{}
	quitOnce sync.Once
	wg       sync.WaitGroup

	mu      sync.Mutex
	results []result
}

type result struct {
	*ask
	*cluster.Reply
}

func startLoad(t *testing.T, r *cluster.Router, list []*ask, streams int) *load {
	l := &load{client: cluster.NewClient(t), quit: make(chan struct{})}
	for c := range streams {
		rng := rand.New(rand.NewPCG(uint64(c), 1))
		l.wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-l.quit:
					return
				default:
				}
				a, salt := list[rng.IntN(len(list))], ""
				if n%3 == 0 {
					salt = fmt.Sprintf("%d-%d-%d", time.Now().UnixNano(), c, n)
				}
				ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
				l.inFlight.Add(1)
				got := a.send(ctx, l.client, r.URL, salt)
				l.inFlight.Add(-1)
				cancel()
				l.mu.Lock()
				l.results = append(l.results, result{a, got})
				l.mu.Unlock()
			}
		})
	}
	t.Cleanup(func() { l.stop() }) // of a test that gave up
	return l
}

// warm waits until all requests are on their way, most of them in the middle
// of their answers.
func (l *load) warm(t *testing.T) {
	t.Helper()
	l.warmTo(t, streams)
	time.Sleep(500 * time.Millisecond)
}

// answered waits until n answers have come, of those that count; nil is all.
func (l *load) answered(t *testing.T, n int, counts func(result) bool) {
	t.Helper()
	l.answeredIn(t, 20*time.Second, n, counts)
}

func (l *load) answeredIn(t *testing.T, limit time.Duration, n int, counts func(result) bool) {
	t.Helper()
	cluster.Wait(t, limit, "answers", func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		got := 0
		for _, r := range l.results {
			if counts == nil || counts(r) {
				got++
			}
		}
		if got < n {
			return fmt.Errorf("%d of %d have come", got, n)
		}
		return nil
	})
}

func (l *load) warmTo(t *testing.T, streams int64) {
	t.Helper()
	cluster.Wait(t, 10*time.Second, "load", func() error {
		if n := l.inFlight.Load(); n < streams {
			return fmt.Errorf("%d in flight", n)
		}
		return nil
	})
}

// stop lets the running requests finish and returns all results.
func (l *load) stop() []result {
	l.quitOnce.Do(func() { close(l.quit) })
	l.wg.Wait()
	l.client.CloseIdleConnections()
	return l.results
}
