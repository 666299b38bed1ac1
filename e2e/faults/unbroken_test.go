package faults

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// TestUnbroken: decode workers are killed, stopped, cut off and drained, one strike after the other, while
// all kinds of requests are answered. Each answer is as in a run that nothing disturbs, and after
// each strike nothing is held. XPYD_UNBROKEN is the number of strikes (12), XPYD_UNBROKEN_SEED
// draws them and the requests (1).
func TestUnbroken(t *testing.T) {
	t.Parallel()
	setting := func(name, otherwise string) uint64 {
		n, err := strconv.ParseUint(cmp.Or(os.Getenv(name), otherwise), 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return n
	}
	strikes, seed := int(setting("XPYD_UNBROKEN", "12")), setting("XPYD_UNBROKEN_SEED", "1")
	u := newUnbroken(t)
	began, kinds, seams := time.Now(), map[string]int{}, 0
	for n := 1; n <= strikes; n++ {
		r := rand.New(rand.NewPCG(seed, uint64(n)))
		for range 20 { // until one finds a stream
			done, more := u.round(t, r, n)
			seams += more
			for _, kind := range done {
				kinds[kind]++
			}
			if len(done) > 0 {
				break
			}
		}
		if n%10 == 0 || n == strikes {
			t.Logf("%d of %d strikes of seed %d in %.0f s, %v: %d answers, %d of them with a seam, %d ended early, %d not the same",
				n, strikes, seed, time.Since(began).Seconds(), kinds, u.answers, seams, u.broken, u.wrong)
		}
		if u.broken+u.wrong > 20 {
			t.Fatal("enough")
		}
	}
	if strikes >= 12 && seams == 0 {
		t.Error("no stream was taken over")
	}
}

// unbroken is one prefill and three decode workers. The router reaches the last by a wire.
type unbroken struct {
	*cluster.Router
	client                 *http.Client
	ids                    []string
	args                   map[string][]string
	procs                  map[string]*cluster.Process
	wire                   *wire
	answers, broken, wrong int
}

const wired = "decode-2"

func newUnbroken(t *testing.T) *unbroken {
	u := &unbroken{Router: cluster.Alone(t), client: cluster.NewClient(t), ids: []string{"decode-0", "decode-1", wired}, procs: map[string]*cluster.Process{}}
	at := cluster.Port(t)
	u.wire = newWire(t, at)
	u.args = map[string][]string{wired: {"--listen", at, "--advertise", wireHost, "--kv-listen", wireHost + ":0"}}
	u.Worker(t, fleet.Prefill, "--id", "prefill-0", "--model", tinyModel(t))
	for _, id := range u.ids {
		u.start(t, id)
	}
	u.WaitServing(t, time.Minute, 1, 3)
	return u
}

func (u *unbroken) start(t *testing.T, id string) {
	u.procs[id] = u.Worker(t, fleet.Decode, append([]string{"--id", id, "--model", tinyModel(t)}, u.args[id]...)...)
}

// plan is a fault of the decode of the stream that gets an event after so many others.
type plan struct {
	kind   string
	after  int
	lasts  time.Duration // of a pause
	victim string        // once it is done
	killed string        // who dies while the victim's streams move
}

// planned draws one fault, or two of different workers.
func planned(r *rand.Rand, events int) []plan {
	if kind := r.IntN(6); kind < 2 {
		return []plan{{kind: []string{"move", "moved and killed"}[kind], after: r.IntN(max(events/2, 1)), lasts: time.Duration(r.IntN(40)) * time.Millisecond}}
	}
	plans := make([]plan, 1+r.IntN(4)/3)
	for i := range plans {
		plans[i] = plan{kind: []string{"kill", "kill", "reset", "reset", "stop", "pause"}[r.IntN(6)], after: r.IntN(max(events*3/4, 1)),
			lasts: time.Duration(100+r.IntN(1400)) * time.Millisecond}
	}
	return plans
}

// round sends requests undisturbed, and then again under a strike of one fault or two. It returns
// what was done, and how many streams were taken over; nothing is done if the streams that a fault
// is for have ended.
func (u *unbroken) round(t *testing.T, r *rand.Rand, n int) (kinds []string, seams int) {
	t.Helper()
	asks := make([]drawn, 8+r.IntN(8))
	for i := range asks {
		asks[i] = draw(r, i > 0 && r.IntN(5) == 0)
	}
	var mu sync.Mutex
	events := 0
	want := u.all(t, n, asks, "", func(string, int) {
		mu.Lock()
		defer mu.Unlock()
		events++
	})
	for i, s := range want {
		if s.err != nil || s.seams != 0 {
			t.Fatalf("strike %d: undisturbed: %v, %d seams in %s", n, s.err, s.seams, asks[i].fields)
		}
	}
	plans, salt := planned(r, events), ""
	if r.IntN(2) == 0 { // no cache has the prompts
		salt = fmt.Sprintf(`,"cache_salt":"%d"`, n)
	}
	events = 0
	var paused sync.WaitGroup
	got := u.all(t, n, asks, salt, func(decode string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		events++
		if slices.ContainsFunc(plans, func(p plan) bool { return p.victim == decode }) {
			return
		}
		for i := range plans {
			if p := &plans[i]; events > p.after && p.victim == "" && (p.kind != "reset" || decode == wired) {
				p.victim = decode
				u.do(p, r.IntN(2), &paused)
				return
			}
		}
	})
	paused.Wait()
	what := fmt.Sprintf("strike %d, %+v", n, plans)
	seams = u.judge(t, what, asks, want, got)
	for _, p := range plans {
		if p.victim == "" {
			continue
		}
		kinds = append(kinds, p.kind)
		switch p.kind {
		case "kill", "stop":
			p.killed = p.victim
		case "move", "moved and killed":
			if p.killed != p.victim { // else the next run of it is not drained
				if err := u.drain(p.victim, "undrain"); err != nil {
					t.Error(err)
				}
			}
		}
		if p.killed != "" {
			u.procs[p.killed].Kill()
			<-u.procs[p.killed].Done()
			u.start(t, p.killed)
		}
	}
	u.WaitServing(t, 30*time.Second, 1, 3)
	cluster.Wait(t, afterKnown+slack, "ledgers empty after "+what, u.Idle)
	return kinds, seams
}

func (u *unbroken) drain(id, order string) error {
	return u.Call("POST", "/admin/v1/instances/"+id+"/"+order, nil, nil)
}

// do makes the fault happen, and ends a pause. Of a move, who is left dies, or who is next to the one
// that is left.
func (u *unbroken) do(p *plan, next int, paused *sync.WaitGroup) {
	victim, lasts := u.procs[p.victim], p.lasts
	switch p.kind {
	case "kill":
		victim.Kill()
	case "reset":
		u.wire.cut()
	case "stop":
		victim.Signal(syscall.SIGSTOP)
	case "move", "moved and killed":
		if p.kind != "move" {
			p.killed = u.ids[(slices.Index(u.ids, p.victim)+next)%len(u.ids)]
		}
		paused.Go(func() {
			_ = u.drain(p.victim, "drain") // fails if it is killed before it answers
			if p.killed != "" {
				time.Sleep(p.lasts) // the fault itself
				u.procs[p.killed].Kill()
			}
		})
	case "pause":
		victim.Signal(syscall.SIGSTOP)
		paused.Go(func() {
			time.Sleep(lasts) // the fault itself
			victim.Signal(syscall.SIGCONT)
		})
	}
}

// judge compares the answers with the undisturbed ones.
func (u *unbroken) judge(t *testing.T, what string, asks []drawn, want, got []*told) (seams int) {
	t.Helper()
	for i, s := range got {
		u.answers++
		seams += min(s.seams, 1)
		if bad := s.differs(want[i]); bad != "" {
			if s.err != nil {
				u.broken++
			} else {
				u.wrong++
			}
			t.Errorf("%s: %s: by %s, %d seams, %s", what, asks[i].fields, s.decode, s.seams, bad)
		}
	}
	return seams
}

// all sends all requests at once.
func (u *unbroken) all(t *testing.T, n int, asks []drawn, salt string, met func(decode string, n int)) []*told {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out := make([]*told, len(asks))
	var wg sync.WaitGroup
	for i, a := range asks {
		wg.Go(func() {
			out[i] = tell(ctx, u.client, u.URL+a.path, fmt.Sprintf("strike-%d-%d", n, i), "{"+a.fields+salt+"}", met)
		})
	}
	wg.Wait()
	return out
}

// drawn is a random request.
type drawn struct{ path, fields string }

// draw makes a request.
func draw(r *rand.Rand, whole bool) drawn {
	d := drawn{path: "/v1/completions"}
	chat, most := r.IntN(3) == 0, 30+r.IntN(500)
	f := []string{`"model":"tiny"`, fmt.Sprintf(`"stream":%t,"seed":%d,"max_tokens":%d`, !whole, r.IntN(1<<30), most)}
	add := func(one int, format string, args ...any) bool { // once in so many requests
		if r.IntN(one) > 0 {
			return false
		}
		f = append(f, fmt.Sprintf(format, args...))
		return true
	}
	if !add(4, `"temperature":0`) {
		add(1, `"temperature":%.1f`, 0.3+1.3*r.Float64())
	}
	add(4, `"n":%d`, 2+r.IntN(2))
	words := strings.Fields("Once upon a time there was a little dog who liked to play in the park with Lily and her mom They said hello big red ball happy sad tree")
	text := func(n int) string {
		out := make([]string, n)
		for i := range out {
			out[i] = words[r.IntN(len(words))]
		}
		return strings.Join(out, " ")
	}
	if chat {
		d.path = "/v1/chat/completions"
		add(1, `"messages":[{"role":"system","content":%q},{"role":"user","content":%q}]`, text(r.IntN(6)), text(1+r.IntN(30)))
		add(3, `"logprobs":true,"top_logprobs":%d`, r.IntN(4))
	} else {
		switch r.IntN(4) {
		case 0:
			ids := make([]string, 1+r.IntN(60))
			for i := range ids {
				ids[i] = strconv.Itoa(3 + r.IntN(500))
			}
			add(1, `"prompt":[%s]`, strings.Join(ids, ","))
		case 1:
			add(1, `"prompt":[%q,%q]`, text(1+r.IntN(10)), text(1+r.IntN(10)))
		default:
			add(1, `"prompt":%q`, text(1+r.IntN(40)))
		}
		add(4, `"echo":true`)
		add(3, `"logprobs":%d`, r.IntN(4))
	}
	add(2, `"ignore_eos":true`)
	if add(3, `"stop":[%q,%q]`, text(1), text(2)) {
		add(2, `"min_tokens":%d`, most/2)
	}
	add(3, `"frequency_penalty":%.1f,"presence_penalty":%.1f`, r.Float64(), r.Float64())
	add(4, `"repetition_penalty":%.2f`, 1+r.Float64()/2)
	add(4, `"top_k":%d`, 1+r.IntN(60))
	add(4, `"top_p":%.2f`, 0.5+r.Float64()/2)
	add(5, `"logit_bias":{"%d":%d}`, 3+r.IntN(500), r.IntN(5)-2)
	add(3, `"return_token_ids":true`)
	if !whole {
		add(2, `"stream_options":{"include_usage":true,"continuous_usage_stats":%t}`, r.IntN(2) == 0)
	}
	d.fields = strings.Join(f, ",")
	return d
}

// wire carries connections to a server, and can break them all.
type wire struct{ forwarder }

// wireHost is another address of this host: a worker's host can be advertised, its port cannot.
const wireHost = "127.0.0.2"

// newWire listens at the port of to.
func newWire(t *testing.T, to string) *wire {
	t.Helper()
	_, port, err := net.SplitHostPort(to)
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{}
	w.start(t, net.JoinHostPort(wireHost, port), to, func(client, server net.Conn) {
		pass := func(to, from net.Conn) {
			_, _ = io.Copy(to, from) // one end has left
			client.Close()
			server.Close()
		}
		w.wg.Go(func() { pass(client, server) })
		pass(server, client)
	})
	return w
}

// cut resets all connections.
func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.conns {
		_ = c.(*net.TCPConn).SetLinger(0) // makes it a reset
		c.Close()
	}
}
