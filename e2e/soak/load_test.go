package soak

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
)

// ask is one request and the text that it must be answered with.
type ask struct{ body, want string }

// asks makes n different short requests for stories260k: greedy and seeded,
// streamed and whole; one in ten reads a long prompt, one in ten writes a long
// answer, so that every operation meets some in their middle.
func asks(n int) []*ask {
	r := rand.New(rand.NewPCG(19, 11))
	words := strings.Fields("Once upon a time there was a little dog who liked to play in the park with Lily and her mom They said hello big red ball happy sad tree")
	var out []*ask
	for i := range n {
		long, tokens := 1+r.IntN(5), 4+r.IntN(20)
		switch i % 10 {
		case 3:
			long = 80
		case 7:
			tokens = 200
		}
		text := make([]string, long)
		for k := range text {
			text[k] = words[r.IntN(len(words))]
		}
		sampling := `"temperature":0`
		if i%2 == 1 {
			sampling = fmt.Sprintf(`"temperature":0.9,"top_p":0.95,"seed":%d`, i)
		}
		out = append(out, &ask{body: fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":%d,"ignore_eos":true,"stream":%v,%s`,
			strings.Join(text, " "), tokens, i%3 != 0, sampling)})
	}
	return out
}

func (a *ask) send(ctx context.Context, client *http.Client, url, salt string) *cluster.Reply {
	body := a.body + "}"
	if salt != "" { // keeps it from the prefix cache
		body = fmt.Sprintf(`%s,"cache_salt":%q}`, a.body, salt)
	}
	return cluster.Post(ctx, client, url+"/v1/completions", body)
}

// slowest is how long an answer may take whatever happens: a stopped worker is
// known after three seconds, and a request may meet a few.
const slowest = 45 * time.Second

// load asks until it is stopped, and keeps what was not a right answer.
type load struct {
	answers, wrong atomic.Int64
	quit           chan struct{}
	wg             sync.WaitGroup

	mu       sync.Mutex
	failures []failure
}

type failure struct {
	*cluster.Reply
	body string
}

func startLoad(t *testing.T, r *cluster.Router, list []*ask, streams int) *load {
	t.Helper()
	l := &load{quit: make(chan struct{})}
	client := cluster.NewClient(t)
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
					salt = fmt.Sprintf("%d-%d", c, n)
				}
				ctx, cancel := context.WithTimeout(context.Background(), slowest)
				l.judge(t, a, a.send(ctx, client, r.URL, salt))
				cancel()
			}
		})
	}
	return l
}

// judge counts an answer. A part of the right text and then an error is an
// error; any other text is wrong.
func (l *load) judge(t *testing.T, a *ask, got *cluster.Reply) {
	switch {
	case got.Good() && got.Text == a.want:
		l.answers.Add(1)
		return
	case got.Good() || !strings.HasPrefix(a.want, got.Text):
		l.wrong.Add(1)
		t.Errorf("wrong: %v\n got %q\nwant %q\n%s", got, got.Text, a.want, a.body)
		return
	}
	l.mu.Lock()
	l.failures = append(l.failures, failure{got, a.body})
	l.mu.Unlock()
	time.Sleep(20 * time.Millisecond) // whoever is refused comes back, but not at once
}

func (l *load) stop() []failure {
	close(l.quit)
	l.wg.Wait()
	return l.failures
}

// record fills in what each request is answered with while nothing happens.
func record(t *testing.T, r *cluster.Router, list []*ask) {
	t.Helper()
	client := cluster.NewClient(t)
	for _, a := range list {
		got := a.send(t.Context(), client, r.URL, "")
		if !got.Good() || got.Text == "" {
			t.Fatalf("undisturbed: %v\n%s", got, a.body)
		}
		a.want = got.Text
	}
}
