package supervise_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/supervise"
)

// fakes starts processes that live in a synctest bubble.
type fakes struct {
	mu     sync.Mutex
	pid    int
	starts []string // "name at", name being the first argument
	begin  time.Time
	live   map[string]*fake
	deaf   bool // new processes ignore SIGTERM
	undead bool // and SIGKILL
	fail   error
	refuse error // of a signal that is ignored
}

type fake struct {
	*fakes
	name string
	args []string
	pid  int
	deaf bool
	exit chan supervise.Exit
	once sync.Once
}

func newFakes() *fakes { return &fakes{begin: time.Now(), live: map[string]*fake{}} }

func (f *fakes) Launch(s supervise.Spec) (supervise.Process, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.starts = append(f.starts, fmt.Sprintf("%s@%v", s.Args[0], time.Since(f.begin)))
	if f.fail != nil {
		return nil, f.fail
	}
	f.pid++
	p := &fake{fakes: f, name: s.Args[0], args: s.Args, pid: f.pid, deaf: f.deaf, exit: make(chan supervise.Exit, 1)}
	f.live[p.name] = p
	fmt.Fprintf(s.Output, "hello from %s\n", p.name)
	return p, nil
}

func (f *fakes) get(name string) *fake {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.live[name]
}

func (f *fakes) log() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Join(f.starts, " ")
}

func (p *fake) PID() int             { return p.pid }
func (p *fake) Wait() supervise.Exit { return <-p.exit }
func (p *fake) AwaitDying(ctx context.Context) bool {
	<-ctx.Done()
	return true // they are gone by then
}
func (p *fake) end(code int) {
	p.once.Do(func() {
		p.mu.Lock()
		delete(p.live, p.name)
		p.mu.Unlock()
		p.exit <- supervise.Exit{Code: code}
	})
}
func (p *fake) Terminate() error {
	if !p.deaf {
		p.end(0)
		return nil
	}
	return p.refuse
}
func (p *fake) Kill() error {
	if p.undead {
		return p.refuse
	}
	p.end(-1)
	return nil
}

func child(name, role string) supervise.Child {
	return supervise.Child{Name: name, Role: role, Args: []string{name}}
}

func start(t *testing.T, cfg supervise.Config) *supervise.Supervisor {
	t.Helper()
	s, err := supervise.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// scaleTo is Scale of one role.
func scaleTo(s *supervise.Supervisor, role string, n int, leaves func(string)) (supervise.Scaled, error) {
	done, err := s.Scale(map[string]int{role: n}, leaves)
	return done[role], err
}

func stop(t *testing.T, s *supervise.Supervisor, within time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	if err := s.Stop(ctx); err != nil {
		t.Error(err)
	}
}

func status(s *supervise.Supervisor, name string) supervise.Status {
	for _, st := range s.Status() {
		if st.Name == name {
			return st
		}
	}
	return supervise.Status{}
}

func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		f.fail = errors.New("no such file")
		s := start(t, supervise.Config{Launcher: f})
		if err := s.Add(child("a", "r")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(17 * time.Second)
		want := "a@0s a@100ms a@300ms a@700ms a@1.5s a@3.1s a@6.3s a@11.3s a@16.3s"
		if got := f.log(); got != want {
			t.Fatalf("got  %s\nwant %s", got, want)
		}
		if st := status(s, "a"); st.State != supervise.Backoff || st.Wait != 5*time.Second || st.Starts != 9 || st.Exit.Code != -1 || !strings.Contains(st.Exit.String(), "no such file") {
			t.Fatalf("%+v", st)
		}
		stop(t, s, time.Second)
		if time.Since(f.begin) != 17*time.Second {
			t.Fatal("stop waited for the back-off")
		}
		if st := status(s, "a"); st.State != supervise.Stopped || st.Wait != 0 {
			t.Fatalf("%+v", st)
		}
	})
}

func TestBackoffResetsAfterReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		s := start(t, supervise.Config{Launcher: f})
		c := child("a", "r")
		c.Ready = func(ctx context.Context, pid int) error {
			time.Sleep(time.Second)
			return nil
		}
		if err := s.Add(c); err != nil {
			t.Fatal(err)
		}
		die := func(after time.Duration) {
			time.Sleep(after)
			f.get("a").end(1)
			synctest.Wait()
		}
		wait := func(want time.Duration) {
			t.Helper()
			if st := status(s, "a"); st.Wait != want || st.State != supervise.Backoff {
				t.Fatalf("%+v, want %v", st, want)
			}
			time.Sleep(want)
			synctest.Wait()
		}
		die(1500 * time.Millisecond)
		wait(100 * time.Millisecond)
		die(5900 * time.Millisecond) // ready for 4.9 s
		wait(200 * time.Millisecond)
		die(6 * time.Second)
		wait(100 * time.Millisecond)
		stop(t, s, 10*time.Second)
	})
}

func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		var log strings.Builder // whole once Stop has returned
		s := start(t, supervise.Config{Launcher: f, Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err := s.Add(child("a", "r")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute) // it never beat: that is no silence
		for range 20 {
			s.Heartbeat("a")
			time.Sleep(2 * time.Second)
		}
		if st := status(s, "a"); st.Starts != 1 {
			t.Fatalf("%+v", st)
		}
		time.Sleep(800 * time.Millisecond)
		if f.get("a") == nil {
			t.Fatal("killed early")
		}
		st := status(s, "a")
		for end := time.Now().Add(600 * time.Millisecond); st.State != supervise.Backoff && time.Now().Before(end); st = status(s, "a") {
			time.Sleep(50 * time.Millisecond)
			synctest.Wait()
		}
		if st.Reason != "silent for 3s" || st.State != supervise.Backoff || st.Exit == nil || st.LastLine != "hello from a" {
			t.Fatalf("%+v", st)
		}
		time.Sleep(time.Second)
		if st := status(s, "a"); st.Starts != 2 || f.get("a") == nil {
			t.Fatalf("not started again: %+v", st)
		}
		stop(t, s, time.Second)
		if all := log.String(); !strings.Contains(all, `state=backoff pid=0 exit="exit status -1" reason="silent for 3s" wait=100ms`) || strings.Count(all, " exit=") != 2 {
			t.Errorf("the log:\n%s", all)
		}
	})
}

func TestScale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		s := start(t, supervise.Config{Launcher: f, MaxChildren: 5, Templates: map[string]func(int) supervise.Child{
			"prefill": func(i int) supervise.Child { return child(fmt.Sprint("prefill-", i), "prefill") },
			"same":    func(i int) supervise.Child { return child("prefill-0", "same") },
		}})
		f.deaf = true
		scale := func(role string, n int, want string) {
			t.Helper()
			done, err := scaleTo(s, role, n, nil)
			got := fmt.Sprint(done.Added, done.Removed)
			if err != nil {
				got = err.Error()
			}
			if got != want {
				t.Fatalf("got %s, want %s", got, want)
			}
			synctest.Wait()
		}
		scale("prefill", 2, "[prefill-0 prefill-1] []")
		scale("prefill", 4, "[prefill-2 prefill-3] []")
		scale("prefill", 1, "[] [prefill-3 prefill-2 prefill-1]")
		if st := status(s, "prefill-1"); st.State != supervise.Draining {
			t.Fatalf("%+v", st)
		}
		scale("prefill", 2, "[prefill-4] []") // 1 still drains
		scale("prefill", 3, "scale prefill to 3: too many children")
		scale("prefill", 6, "scale prefill to 6: too many children")
		scale("other", 1, "scale other: no such role")
		time.Sleep(31 * time.Second) // drain deadline
		if n := len(s.Status()); n != 2 {
			t.Fatalf("%d children", n)
		}
		scale("same", 2, "scale same to 2: prefill-0: names repeat")
		scale("prefill", 3, "[prefill-1] []")
		if err := s.Add(child("prefill-1", "x")); err == nil {
			t.Fatal("a name twice")
		}
		if !s.Remove("prefill-1") || s.Remove("nobody") {
			t.Fatal("remove")
		}
		stop(t, s, time.Second) // all are deaf: killed at the deadline
		if err := s.Add(child("x", "x")); !errors.Is(err, supervise.ErrStopping) {
			t.Fatal(err)
		}
	})
}

// TestScaleBy: so many more or fewer than are wanted, but never none.
func TestScaleBy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := start(t, supervise.Config{Launcher: newFakes(), Templates: map[string]func(int) supervise.Child{
			"w": func(i int) supervise.Child { return child(fmt.Sprint("w-", i), "w") }}})
		by := func(n int, want string) {
			t.Helper()
			done, err := s.ScaleBy("w", n)
			if got := fmt.Sprint(done.Added, done.Removed); got != want || err != nil {
				t.Errorf("by %d: %s, %v, want %s", n, got, err, want)
			}
			synctest.Wait()
		}
		by(2, "[w-0 w-1] []")
		by(1, "[w-2] []")
		by(-2, "[] [w-2 w-1]")
		by(-1, "[] []")
		stop(t, s, time.Second)
	})
}

// TestScaleTaken: names that others have are left out.
func TestScaleTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := start(t, supervise.Config{Launcher: newFakes(), Taken: func(name string) bool { return name == "w-0" || name == "w-2" },
			Templates: map[string]func(int) supervise.Child{"w": func(i int) supervise.Child { return child(fmt.Sprint("w-", i), "w") }}})
		done, err := scaleTo(s, "w", 3, nil)
		if b, jerr := json.Marshal(done); jerr != nil || string(b) != `{"added":["w-1","w-3","w-4"],"removed":[],"kept":[]}` { // for scripts
			t.Errorf("%s, %v", b, jerr)
		}
		if err != nil || fmt.Sprint(done.Added) != "[w-1 w-3 w-4]" {
			t.Errorf("%+v, %v", done, err)
		}
		stop(t, s, time.Second)
	})
}

// seats are those of a table, by number.
type seats struct {
	free []string
	has  map[string]string
}

func (s *seats) Take(role, name string) ([]string, error) {
	if len(s.free) == 0 {
		return nil, fmt.Errorf("no seat for %s", name)
	}
	seat := s.free[0]
	s.free, s.has[name] = s.free[1:], seat
	return []string{"--seat", seat}, nil
}

func (s *seats) Give(name string) {
	if seat, ok := s.has[name]; ok {
		s.free = append(s.free, seat)
		delete(s.has, name)
	}
}

// TestSeats: each child has a seat from before its first start until it has ended for good; an order
// for which there are not enough changes nothing.
func TestSeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		table := &seats{free: []string{"1", "2", "3"}, has: map[string]string{}}
		role := func(role string) func(int) supervise.Child {
			return func(i int) supervise.Child {
				c := child(fmt.Sprint(role, i), role)
				c.Again = func(int) (string, []string) { return role, []string{c.Name, "again"} }
				return c
			}
		}
		s := start(t, supervise.Config{Launcher: f, Seats: table, MaxChildren: 4, Templates: map[string]func(int) supervise.Child{"p": role("p"), "d": role("d")}})
		sits := func(want string) {
			t.Helper()
			synctest.Wait()
			var got []string
			for _, name := range slices.Sorted(maps.Keys(f.live)) {
				got = append(got, strings.Join(f.live[name].args, " "))
			}
			if all := strings.Join(got, ", "); all != want || len(table.has) != len(got) {
				t.Errorf("%s, want %s; seats: %v", all, want, table.has)
			}
		}
		scale := func(p, d int, wrong string) {
			t.Helper()
			done, err := s.Scale(map[string]int{"p": p, "d": d}, nil)
			if (err != nil) != (wrong != "") || err != nil && (!strings.Contains(err.Error(), wrong) || len(done) > 0) {
				t.Errorf("%+v, %v, want %q", done, err, wrong)
			}
		}
		scale(1, 1, "")
		sits("d0 --seat 2, p0 --seat 1") // p first
		scale(2, 2, "no seat for d1")
		scale(3, 1, "no seat for p2")
		scale(2, 2, "no seat for d1") // again: none was lost
		scale(1, 4, "too many children")
		sits("d0 --seat 2, p0 --seat 1")
		f.get("p0").end(1)
		time.Sleep(time.Second)
		sits("d0 --seat 2, p0 again --seat 1")
		f.deaf = true
		scale(2, 1, "")
		sits("d0 --seat 2, p0 again --seat 1, p1 --seat 3")
		scale(1, 1, "")
		scale(1, 2, "no seat for d1") // p1 drains
		f.get("p1").end(0)
		synctest.Wait()
		scale(1, 2, "")
		sits("d0 --seat 2, d1 --seat 3, p0 again --seat 1")
		stop(t, s, time.Second)
		if len(table.has) != 0 {
			t.Errorf("after the stop: %v", table.has)
		}
		if _, err := s.Scale(map[string]int{"p": 1}, nil); !errors.Is(err, supervise.ErrStopping) || len(table.has) != 0 {
			t.Errorf("after the stop: %v, %v", err, table.has)
		}
	})
}

// TestScaleByReadiness: who is not ready yet goes before who is, and all are listed by name.
func TestScaleByReadiness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		f.deaf = true
		s := start(t, supervise.Config{Launcher: f, Templates: map[string]func(int) supervise.Child{"p": func(i int) supervise.Child {
			c := child(fmt.Sprint("p-", i), "p")
			if i%2 == 1 {
				c.Ready = func(ctx context.Context, _ int) error { <-ctx.Done(); return ctx.Err() }
			}
			return c
		}}})
		if _, err := scaleTo(s, "p", 6, nil); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if done, err := scaleTo(s, "p", 2, nil); err != nil || fmt.Sprint(done.Removed, done.Kept) != "[p-5 p-3 p-1 p-4] [p-2 p-0]" {
			t.Errorf("%+v, %v", done, err)
		}
		var names []string
		for _, st := range s.Status() {
			names = append(names, st.Name)
		}
		if got := strings.Join(names, " "); got != "p-0 p-1 p-2 p-3 p-4 p-5" {
			t.Error(got)
		}
		stop(t, s, time.Second)
	})
}

// TestScaleByUse: whoever is idle goes first, then who does not work yet, then
// who came from another role; the role of the moment counts.
func TestScaleByUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		f.deaf = true
		template := func(role string) func(int) supervise.Child {
			return func(i int) supervise.Child { return child(fmt.Sprint(role, "-", i), role) }
		}
		use, now := map[string]supervise.Use{}, map[string]string{}
		s := start(t, supervise.Config{Launcher: f, Templates: map[string]func(int) supervise.Child{"p": template("p"), "d": template("d")},
			Doing: func(st supervise.Status) (string, supervise.Use) {
				u, ok := use[st.Name]
				if !ok {
					u = supervise.Working
				}
				return cmp.Or(now[st.Name], st.Role), u
			}})
		scale := func(role string, n int, want string) {
			t.Helper()
			done, err := scaleTo(s, role, n, nil)
			if got := fmt.Sprint(done.Added, done.Removed, done.Kept); err != nil || got != want {
				t.Fatalf("got %s, %v, want %s", got, err, want)
			}
			synctest.Wait()
		}
		scale("d", 2, "[d-0 d-1] [] []")
		use["d-0"] = supervise.Idle
		scale("d", 2, "[] [] [d-0 d-1]") // it counts: it can be undrained
		scale("d", 1, "[] [d-0] [d-1]")
		scale("d", 2, "[d-2] [] [d-1]") // what drains as it was told does not
		use["d-2"] = supervise.Coming
		scale("d", 3, "[d-3] [] [d-2 d-1]")
		scale("d", 2, "[] [d-2] [d-3 d-1]")
		scale("p", 1, "[p-0] [] []")
		now["d-3"] = "p"
		scale("d", 1, "[] [] [d-1]") // as it is
		scale("p", 2, "[] [] [d-3 p-0]")
		scale("p", 1, "[] [d-3] [p-0]")
		now["d-1"], use["p-0"] = "p", supervise.Idle
		scale("p", 1, "[] [p-0] [d-1]") // the only one that works
		scale("p", 12, "[p-1 p-2 p-3 p-4 p-5 p-6 p-7 p-8 p-9 p-10 p-11] [] [d-1]")
		scale("p", 10, "[] [d-1 p-11] [p-10 p-9 p-8 p-7 p-6 p-5 p-4 p-3 p-2 p-1]") // from another role, though its name is shorter
		stop(t, s, time.Second)
	})
}

// TestAgain: what an order has made of a child outlasts its process.
func TestAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		s := start(t, supervise.Config{Launcher: f})
		c := child("a", "r")
		c.Again = func(int) (string, []string) { return "other", []string{"b"} }
		if err := s.Add(c); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		f.get("a").end(1)
		time.Sleep(time.Second)
		if st := status(s, "a"); f.log() != "a@0s b@100ms" || st.Role != "other" || st.State != supervise.Ready {
			t.Fatalf("%s, %+v", f.log(), st)
		}
		stop(t, s, time.Second)
	})
}

// TestDrainingIsNotReady: a child that was asked to end is not shown as ready,
// neither at once nor when its process turns out to serve after all.
func TestDrainingIsNotReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		f.deaf = true
		var shown []supervise.State
		s := start(t, supervise.Config{Launcher: f, OnEvent: func(e supervise.Event) { shown = append(shown, e.State) }})
		serves := make(chan struct{})
		slow := child("slow", "r")
		slow.Ready = func(ctx context.Context, _ int) error {
			select {
			case <-serves:
			case <-ctx.Done():
			}
			return ctx.Err()
		}
		if err := s.Add(slow); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		s.Remove("slow")
		if st := status(s, "slow").State; st != supervise.Draining {
			t.Errorf("asked to end, and %s", st)
		}
		close(serves)
		synctest.Wait()
		if st := status(s, "slow").State; st != supervise.Draining {
			t.Errorf("serves too late, and %s", st)
		}
		f.get("slow").end(0)
		synctest.Wait()
		if got := fmt.Sprint(shown); got != "[starting draining draining stopped]" && got != "[starting draining stopped]" {
			t.Error(got)
		}
		stop(t, s, time.Second)
	})
}

func TestStopOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		var mu sync.Mutex
		var order []string
		s := start(t, supervise.Config{
			Launcher: f, StopOrder: []string{"router", "decode", "prefill"},
			OnEvent: func(e supervise.Event) {
				if e.State == supervise.Stopped {
					mu.Lock()
					defer mu.Unlock()
					order = append(order, e.Name)
				}
			},
		})
		for _, role := range []string{"prefill", "other", "decode", "router"} {
			if err := s.Add(child(role, role)); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
		stop(t, s, time.Second)
		if got := strings.Join(order, " "); got != "router decode prefill other" {
			t.Fatal(got)
		}
		stop(t, s, time.Second) // twice is fine
	})
}

func TestSecondSignal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		f.deaf = true
		s := start(t, supervise.Config{Launcher: f})
		if err := s.Add(child("a", "r")); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		time.AfterFunc(2*time.Second, s.Kill)
		stop(t, s, time.Minute)
		if d := time.Since(f.begin); d != 2*time.Second {
			t.Fatal(d)
		}
	})
}

func TestWaitReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		s := start(t, supervise.Config{Launcher: f})
		slow := child("slow", "r")
		slow.Ready = func(ctx context.Context, _ int) error { <-ctx.Done(); return ctx.Err() }
		if err := s.Add(slow); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := s.WaitReady(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		time.AfterFunc(time.Second, func() { f.get("slow").end(1) })
		var failed *supervise.StartError
		if err := s.WaitReady(t.Context()); !errors.As(err, &failed) || err.Error() != "slow: hello from slow" || failed.Status.Exit.Code != 1 {
			t.Fatal(err)
		}
		never := child("never", "r")
		never.Ready = func(context.Context, int) error { return errors.New("bad model") }
		if err := s.Add(never); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if st := status(s, "never"); st.Reason != "not ready: bad model" || st.State != supervise.Backoff {
			t.Fatalf("%+v", st)
		}
		stop(t, s, time.Second)
	})
}

// TestManyNames: of children that are equally useful those with the highest index go first, 10
// before 9, and only one idle one before a stranger.
func TestManyNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := start(t, supervise.Config{Launcher: newFakes(), Templates: map[string]func(int) supervise.Child{
			"w": func(i int) supervise.Child { return child(fmt.Sprint("w-", i), "w") },
		}})
		f := func(n int, want string) {
			t.Helper()
			synctest.Wait()
			done, err := scaleTo(s, "w", n, nil)
			if got := fmt.Sprint(done.Removed); err != nil || got != want || len(done.Removed)+len(done.Kept)+len(done.Added) != max(n, 12) {
				t.Errorf("%d: removed %s, %+v, %v; want %s", n, got, done, err, want)
			}
		}
		f(12, "[]")
		f(9, "[w-11 w-10 w-9]")
		synctest.Wait()
		if done, err := scaleTo(s, "w", 257, nil); !errors.Is(err, supervise.ErrTooMany) || len(done.Added) != 0 {
			t.Errorf("more than may be, %d added: %v", len(done.Added), err)
		}
		if done, err := scaleTo(s, "w", 256, nil); err != nil || len(done.Added) != 247 {
			t.Errorf("%d added, %v", len(done.Added), err)
		}
		if _, err := scaleTo(s, "w", 257, nil); !errors.Is(err, supervise.ErrTooMany) {
			t.Errorf("one more than may be: %v", err)
		}
		if _, err := scaleTo(s, "w", -1, nil); !errors.Is(err, supervise.ErrTooMany) {
			t.Errorf("less than none: %v", err)
		}
		if done, err := scaleTo(s, "w", 0, nil); err != nil || len(done.Removed) != 256 || len(done.Kept)+len(done.Added) != 0 {
			t.Errorf("none at all: %d removed, %v", len(done.Removed), err)
		}
		stop(t, s, time.Second)
	})
}

// TestDrainTimeout: a child that does not exit is killed when it has had its time, and its status
// says so; the time is as set, or half a minute.
func TestDrainTimeout(t *testing.T) {
	for _, set := range []time.Duration{0, 2 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			f := newFakes()
			f.deaf, f.refuse = true, errors.New("not permitted")
			var last supervise.Event
			var log bytes.Buffer
			s := start(t, supervise.Config{Launcher: f, DrainTimeout: set, Log: slog.New(slog.NewTextHandler(&log, nil)), OnEvent: func(e supervise.Event) { last = e }})
			if err := s.Add(child("a", "r")); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if st := status(s, "a"); st.PID != 1 || st.State != supervise.Ready || st.Exit != nil || st.Starts != 1 {
				t.Errorf("%+v", st)
			}
			s.Remove("a")
			limit := cmp.Or(set, 30*time.Second)
			time.Sleep(limit - time.Nanosecond)
			synctest.Wait()
			if st := status(s, "a"); st.State != supervise.Draining || st.PID != 1 {
				t.Errorf("before its time is over: %+v", st)
			}
			time.Sleep(time.Nanosecond)
			synctest.Wait()
			if last.State != supervise.Stopped || last.PID != 0 || last.Exit == nil || last.Exit.Code != -1 || last.Reason != fmt.Sprintf("did not exit within %v", limit) ||
				last.LastLine != "hello from a" || last.At.Sub(f.begin) != limit {
				t.Errorf("in the end %+v after %v", last, last.At.Sub(f.begin))
			}
			stop(t, s, time.Second)
			if !strings.Contains(log.String(), "msg=terminate child=a pid=1 err=\"not permitted\"") {
				t.Errorf("it is not said that it cannot be told: %s", log.String())
			}
		})
	}
}

// TestRestarted: between two starts a child has no process, and says how the last one ended.
func TestRestarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		s := start(t, supervise.Config{Launcher: f, BackoffMin: time.Second, BackoffMax: 3 * time.Second})
		if err := s.Add(child("a", "r")); err != nil {
			t.Fatal(err)
		}
		for i, wait := range []time.Duration{1, 2, 3, 3} {
			synctest.Wait()
			if st := status(s, "a"); st.PID != i+1 || st.Starts != i+1 || st.State != supervise.Ready || st.Wait != 0 || !st.Since.Equal(time.Now()) || !st.WasReady {
				t.Errorf("start %d: %+v", i, st)
			}
			f.get("a").end(7 + i)
			synctest.Wait()
			if st := status(s, "a"); st.PID != 0 || st.State != supervise.Backoff || st.Exit == nil || st.Exit.Code != 7+i || st.Exit.String() != fmt.Sprintf("exit status %d", 7+i) ||
				st.Reason != "" || st.Wait != wait*time.Second {
				t.Errorf("end %d: %+v", i, st)
			}
			time.Sleep(wait * time.Second)
		}
		synctest.Wait() // it runs once more
		stop(t, s, time.Second)
		if st := status(s, "a"); st.State != supervise.Stopped || st.PID != 0 || st.Exit.Code != 0 {
			t.Errorf("in the end %+v", st)
		}
	})
	var none *supervise.Exit
	if none.String() != "did not exit" || (&supervise.Exit{Code: -1, Err: "x"}).String() != "x" {
		t.Error(none.String())
	}
}

// TestUndead: Stop gives up on a process that does not die, names it, and does not wait for ever.
func TestUndead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		f.deaf, f.undead, f.refuse = true, true, errors.New("not permitted")
		var log bytes.Buffer
		s := start(t, supervise.Config{Launcher: f, Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err := s.Add(child("a", "r")); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		if err := s.Stop(ctx); err == nil || !strings.Contains(err.Error(), "a (pid 1) does not die") {
			t.Error(err)
		}
		if d := time.Since(f.begin); d != 8*time.Second {
			t.Errorf("after %v", d)
		}
		f.get("a").end(0)
		stop(t, s, time.Second)
		if !strings.Contains(log.String(), "msg=kill child=a pid=1 err=\"not permitted\"") {
			t.Errorf("it is not said that it cannot be killed: %s", log.String())
		}
	})
}

// TestScaleTells: whoever scales hears of each child that goes, before that one knows.
func TestScaleTells(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes()
		s := start(t, supervise.Config{Launcher: f, Templates: map[string]func(int) supervise.Child{"r": func(i int) supervise.Child { return child(fmt.Sprint("r-", i), "r") }}})
		if _, err := scaleTo(s, "r", 3, func(name string) { t.Errorf("%s does not go", name) }); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		var told []string
		done, err := scaleTo(s, "r", 1, func(name string) {
			told = append(told, name)
			if f.get(name) == nil {
				t.Errorf("%s knew before", name)
			}
		})
		if err != nil || len(told) != 2 || !slices.Equal(told, done.Removed) {
			t.Errorf("told of %q, removed %q: %v", told, done.Removed, err)
		}
		synctest.Wait()
		stop(t, s, time.Second)
	})
}
