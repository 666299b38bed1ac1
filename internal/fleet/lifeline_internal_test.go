package fleet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"
)

// trip answers requests without a network.
type trip func(*http.Request) (*http.Response, error)

func (f trip) RoundTrip(q *http.Request) (*http.Response, error) { return f(q) }

// opened is the answer that opens a lifeline.
func opened(body io.Reader) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, TransferEncoding: []string{"chunked"}, Body: io.NopCloser(body)}, nil
}

// lasting is a body without an end but the request's.
type lasting struct{ q *http.Request }

func (l lasting) Read([]byte) (int, error) {
	<-l.q.Context().Done()
	return 0, l.q.Context().Err()
}

// TestLifelineAnswers: only an answer in time that goes on is a lifeline; its end is a death, and the
// watcher's own end is none.
func TestLifelineAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		answer func(q *http.Request) (*http.Response, error)
		asked  int    // in ten seconds
		death  string // how it is told
	}{
		"lasts":   {func(q *http.Request) (*http.Response, error) { return opened(lasting{q}) }, 1, ""},
		"ends":    {func(*http.Request) (*http.Response, error) { return opened(strings.NewReader("\n\n")) }, 30, "lifeline ended: EOF"},
		"breaks":  {func(*http.Request) (*http.Response, error) { return opened(iotest.ErrReader(errors.New("reset"))) }, 30, "lifeline ended: reset"},
		"refused": {func(*http.Request) (*http.Response, error) { return nil, errors.New("refused") }, 4, ""},
		"another status": {func(*http.Request) (*http.Response, error) {
			r, err := opened(strings.NewReader(""))
			r.StatusCode = http.StatusNoContent
			return r, err
		}, 4, ""},
		"of known length": {func(*http.Request) (*http.Response, error) {
			r, err := opened(strings.NewReader(""))
			r.TransferEncoding = nil
			return r, err
		}, 4, ""},
		"never answers": {func(q *http.Request) (*http.Response, error) {
			<-q.Context().Done()
			return nil, q.Context().Err()
		}, 3, ""},
		"answers late": {func(*http.Request) (*http.Response, error) {
			time.Sleep(2*time.Second + 1)
			return opened(strings.NewReader(""))
		}, 3, ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			var out bytes.Buffer
			w, err := Watch(WatcherConfig{Log: slog.New(slog.NewTextHandler(&out, nil))})
			if err != nil {
				t.Fatal(err)
			}
			l := WatchLifeline(w, LifelineConfig{})
			asked := 0
			l.client.Transport = trip(func(q *http.Request) (*http.Response, error) {
				if asked++; q.Method+" "+q.URL.String()+" "+q.UserAgent() != "GET http://h:1/p/xpyd/v1/lifeline xpyd" {
					t.Errorf("asked by %s: %s %s", q.UserAgent(), q.Method, q.URL)
				}
				return c.answer(q)
			})
			i := *worker("a", 1)
			i.URL = "http://h:1/p/"
			if err := w.AddStatic(i, Static); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			time.Sleep(10 * time.Second)
			l.Close()
			m := w.Snapshot().Get("a")
			w.Close()
			if asked < c.asked || c.asked < 9 && asked > 2*c.asked {
				t.Errorf("%s: asked %d times, want %d or so", name, asked, c.asked)
			}
			if name == "lasts" && (asked != 1 || m.State != Live || m.Heard.Before(began)) {
				t.Errorf("%s: asked %d times, %+v", name, asked, m)
			}
			if told := strings.Contains(out.String(), "lifeline ended"); told != (c.death != "") || !strings.Contains(out.String(), c.death) {
				t.Errorf("%s: told %s", name, out.String())
			}
		})
	}
}

// TestLifelineWaits: who does not answer is asked again after twice as long each time, up to a bound,
// and not at the same moment by all; whose lifeline ended, soon.
func TestLifelineWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, err := Watch(WatcherConfig{})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		l := WatchLifeline(w, LifelineConfig{})
		defer l.Close()
		times := make(chan time.Time, 999)
		const fails = 120
		asked := 0
		l.client.Transport = trip(func(*http.Request) (*http.Response, error) {
			times <- time.Now()
			if asked++; asked != fails {
				return nil, errors.New("refused")
			}
			return opened(strings.NewReader(""))
		})
		if err := w.AddStatic(*worker("a", 1), Static); err != nil {
			t.Fatal(err)
		}
		last := <-times
		var least, most float64 = 1, 0
		next := func(wait time.Duration) {
			t.Helper()
			at := <-times
			part := float64(at.Sub(last)) / float64(wait)
			if last = at; part < 0.5 || part > 1 {
				t.Errorf("asked after %v of %v", part, wait)
			}
			least, most = min(least, part), max(most, part)
		}
		for _, ms := range []time.Duration{250, 500, 1000, 2000, 4000} {
			next(ms * time.Millisecond)
		}
		for range fails - 6 {
			next(5 * time.Second)
		}
		if least > 0.6 || most < 0.9 {
			t.Errorf("all wait for %v to %v of what they may", least, most)
		}
		next(250 * time.Millisecond)
		next(500 * time.Millisecond)
	})
}

// TestWhoHasALifeline: members that run, and configured ones that are dead, each run once; no foreign
// engines, and nobody who has ended.
func TestWhoHasALifeline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, err := Watch(WatcherConfig{})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		l := WatchLifeline(w, LifelineConfig{})
		var mu sync.Mutex
		open, asked := map[string]int{}, 0
		count := func(host string, n int) {
			mu.Lock()
			defer mu.Unlock()
			if open[host] += n; open[host] == 0 {
				delete(open, host)
			}
			asked += max(n, 0)
		}
		l.client.Transport = trip(func(q *http.Request) (*http.Response, error) {
			count(q.URL.Host, 1)
			go func() {
				<-q.Context().Done()
				count(q.URL.Host, -1)
			}()
			return opened(lasting{q})
		})
		f := func(what string, change func(now time.Time), times int, want ...string) {
			t.Helper()
			w.change(change)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			var have []string
			for host, n := range open {
				have = append(have, fmt.Sprint(host, n))
			}
			if slices.Sort(have); !slices.Equal(have, want) || asked != times {
				t.Errorf("%s: %v after %d requests, want %v after %d", what, have, asked, want, times)
			}
		}
		come := func(id string, epoch uint64, source Source, dialect string) func(time.Time) {
			return func(now time.Time) {
				i := worker(id, epoch)
				i.URL, i.Dialect = "http://"+id, dialect
				w.reg.announce(i, source, now)
			}
		}
		is := func(id string, s State) func(time.Time) {
			return func(now time.Time) { w.reg.end(w.reg.members[id], s, causeSilence, "", now) }
		}
		f("nobody", func(time.Time) {}, 0)
		f("configured", come("s", 1, Static, Native), 1, "s1")
		f("announced", come("n", 1, NATS, Native), 2, "n1", "s1")
		f("foreign", come("f", 1, Static, "openai"), 2, "n1", "s1")
		f("suspect", is("n", Suspect), 2, "n1", "s1")
		f("unheard", is("n", Unheard), 2, "n1", "s1")
		f("dead", is("n", Dead), 2, "s1")
		f("back", is("n", Live), 3, "n1", "s1")
		f("another run", come("n", 2, NATS, Native), 4, "n1", "s1")
		f("configured and dead", is("s", Dead), 4, "n1", "s1")
		f("taken out", is("s", Gone), 4, "n1")
		f("gone", is("n", Gone), 4)
		f("anew", come("s", 2, Static, Native), 5, "s1")
		l.Close()
		f("closed", func(time.Time) {}, 5)
	})
}

// TestProbes: each probe has a connection of its own, asks for this run and for no compression.
func TestProbes(t *testing.T) {
	from := make(chan string, 9)
	s := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, q *http.Request) {
		from <- q.RemoteAddr + " " + q.Header.Get("Accept-Encoding")
		rw.Header().Set(HeaderInstance, "a@1234567890123456")
	}))
	defer s.Close()
	i := *worker("a", 1234567890123456)
	i.URL = s.URL
	probe := ProbeHealth(nil, nil)
	for range 2 {
		if err := probe(t.Context(), &i); err != nil {
			t.Fatal(err)
		}
	}
	if a, b := <-from, <-from; a == b || !strings.HasSuffix(a, " ") {
		t.Errorf("asked from %s and %s", a, b)
	}
	for _, url := range []string{"http://%zz", "http://127.0.0.1:1", ""} {
		if i.URL = url; probe(t.Context(), &i) == nil {
			t.Errorf("%q answers", url)
		}
	}
}

// TestLifelineNowhere: an address that is none is no lifeline.
func TestLifelineNowhere(t *testing.T) {
	w, err := Watch(WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	l := &Lifeline{fleet: w, cfg: LifelineConfig{Timeout: time.Minute}, client: http.DefaultClient}
	if opened, err := l.hold(t.Context(), target{url: "http://%zz"}); opened || err == nil {
		t.Errorf("opened %t: %v", opened, err)
	}
}
