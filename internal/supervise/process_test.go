package supervise_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/supervise"
)

// patience bounds each wait for what must come: long for a starved machine, and
// short of the limit of go test, which would not say what hung.
const patience = 2 * time.Minute

// TestMain makes the test binary play the part that its first argument
// names.
func TestMain(m *testing.M) {
	switch part := os.Getenv("SUPERVISE_TEST_PART"); part {
	case "":
		os.Exit(m.Run())
	case "child": // says its pid and ignores SIGTERM
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("pid", os.Getpid())
		time.Sleep(time.Hour)
	case "polite": // exits when asked to, or when its parent is gone
		asked := make(chan os.Signal, 1)
		signal.Notify(asked, syscall.SIGTERM)
		gone, err := supervise.ParentGone(context.Background())
		if err != nil || gone == nil {
			fmt.Println("no parent", err)
			os.Exit(1)
		}
		fmt.Println("pid", os.Getpid())
		select {
		case <-asked:
			fmt.Print("bye ", os.Getenv("SUPERVISE_TEST_WORD"))
		case <-gone:
		}
	case "family": // starts a child of its own, in its group, and exits
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "SUPERVISE_TEST_PART=child")
		cmd.Stdout = os.Stdout
		if err := cmd.Start(); err != nil {
			fmt.Println(err)
		}
		time.Sleep(200 * time.Millisecond)
		os.Exit(3)
	case "parent": // supervises two children until it is killed
		s, err := supervise.New(supervise.Config{Output: os.Stdout})
		if err != nil {
			panic(err)
		}
		for i, part := range []string{"child", "polite"} {
			if err := s.Add(part2child(fmt.Sprint("c", i), part)); err != nil {
				panic(err)
			}
		}
		time.Sleep(time.Hour)
	default:
		panic(part)
	}
}

func part2child(name, part string) supervise.Child {
	return supervise.Child{Name: name, Role: "r", Path: os.Args[0], Env: []string{"SUPERVISE_TEST_PART=" + part}}
}

// ended reports whether a process is gone; a zombie counts, because who reaps
// orphans is not ours to say.
func ended(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(rest, "Z")
}

func within(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

// noLeak fails the test if descriptors or goroutines outlive it.
func noLeak(t *testing.T) {
	count := func() (fds, goroutines int) {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("needs /proc")
		}
		return len(list), runtime.NumGoroutine()
	}
	fds, goroutines := count()
	t.Cleanup(func() {
		within(t, "descriptors or goroutines leak", func() bool {
			f, g := count()
			return f <= fds && g <= goroutines
		})
	})
}

// buffer is a bytes.Buffer for several goroutines.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// pids are those that children said, by the prefix of their lines.
func pids(t *testing.T, text string) map[string]int {
	t.Helper()
	out := map[string]int{}
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		name, rest, ok := strings.Cut(lines.Text(), " pid ")
		if !ok {
			continue
		}
		pid, err := strconv.Atoi(rest)
		if err != nil {
			t.Fatal(lines.Text())
		}
		out[strings.Trim(name, "[]")] = pid
	}
	return out
}

func TestChildrenDieWithAKilledParent(t *testing.T) {
	noLeak(t)
	var out buffer
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), "SUPERVISE_TEST_PART=parent")
	parent.Stdout, parent.Stderr = &out, &out
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	within(t, "children start", func() bool { return len(pids(t, out.String())) == 2 })
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	for name, pid := range pids(t, out.String()) {
		within(t, name+" is an orphan", func() bool { return ended(pid) })
	}
}

func TestRealProcesses(t *testing.T) {
	noLeak(t)
	t.Setenv("SUPERVISE_TEST_WORD", "inherited")
	var out buffer
	s, err := supervise.New(supervise.Config{Output: &out})
	if err != nil {
		t.Fatal(err)
	}
	for name, part := range map[string]string{"deaf": "child", "polite": "polite"} {
		if err := s.Add(part2child(name, part)); err != nil {
			t.Fatal(err)
		}
	}
	within(t, "children start", func() bool { return len(pids(t, out.String())) == 2 })
	was := pids(t, out.String())
	if st := status(s, "deaf"); st.PID != was["deaf"] || st.State != supervise.Ready {
		t.Fatalf("%+v, %v", st, was)
	}
	if pgid, err := syscall.Getpgid(was["deaf"]); err != nil || pgid != was["deaf"] {
		t.Fatal("group", pgid, err)
	}
	// Killed by somebody: started again, as another process.
	if err := syscall.Kill(was["polite"], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	within(t, "restart", func() bool { return pids(t, out.String())["polite"] != was["polite"] })
	if st := status(s, "polite"); st.Exit == nil || st.Exit.Err != "signal: killed" {
		t.Fatalf("%+v", st)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stopped := make(chan error, 1)
	go func() { stopped <- s.Stop(ctx) }()
	within(t, "the polite one does not exit", func() bool { return status(s, "polite").State == supervise.Stopped })
	if st := status(s, "deaf"); len(stopped) > 0 || st.PID != was["deaf"] || ended(st.PID) {
		t.Errorf("the deaf one is not waited for: %+v", st)
	}
	cancel()
	select {
	case err := <-stopped:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(patience):
		t.Fatal("it does not stop")
	}
	for name, pid := range pids(t, out.String()) {
		if syscall.Kill(pid, 0) == nil {
			t.Errorf("%s (%d) is there, or a zombie", name, pid)
		}
	}
	if !strings.Contains(out.String(), "[polite] bye inherited\n") {
		t.Errorf("output:\n%s", out.String())
	}
	if st := status(s, "polite"); st.State != supervise.Stopped || st.Exit.Code != 0 {
		t.Errorf("%+v", st)
	}
}

func TestGroupIsSwept(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs waitid without reaping")
	}
	noLeak(t)
	var out buffer
	s, err := supervise.New(supervise.Config{Output: &out, BackoffMin: time.Hour, BackoffMax: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Add(part2child("f", "family")); err != nil {
		t.Fatal(err)
	}
	within(t, "exit", func() bool { return status(s, "f").State == supervise.Backoff })
	if st := status(s, "f"); st.Exit.Code != 3 {
		t.Fatalf("%+v", st)
	}
	for _, pid := range pids(t, out.String()) {
		within(t, "a grandchild is left", func() bool { return ended(pid) })
	}
	stop(t, s, time.Second)
}

func TestBadExecutable(t *testing.T) {
	noLeak(t)
	s, err := supervise.New(supervise.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Add(supervise.Child{Name: "x", Path: filepath.Join(t.TempDir(), "none")}); err != nil {
		t.Fatal(err)
	}
	if err := s.WaitReady(t.Context()); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Fatal(err)
	}
	stop(t, s, time.Second)
}

// TestNoDescriptors: without one a supervisor says so, and starts again when there is one.
func TestNoDescriptors(t *testing.T) {
	noLeak(t)
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 0, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	_, err := supervise.New(supervise.Config{})
	if serr := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was); serr != nil {
		t.Fatal(serr)
	}
	if !errors.Is(err, syscall.EMFILE) {
		t.Errorf("%v", err)
	}
	stop(t, start(t, supervise.Config{}), time.Second)
}

func TestParentGone(t *testing.T) {
	t.Setenv("XPYD_PARENT_FD", "")
	if gone, err := supervise.ParentGone(t.Context()); gone != nil || err != nil {
		t.Fatal(gone, err)
	}
	for _, bad := range []string{"x", "-1", "0", "99999"} {
		t.Setenv("XPYD_PARENT_FD", bad)
		if _, err := supervise.ParentGone(t.Context()); err == nil {
			t.Errorf("%s is accepted", bad)
		}
	}
	f := func(end func(cancel func(), w *os.File), want bool) {
		t.Helper()
		before := runtime.NumGoroutine()
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		fd, err := syscall.Dup(int(r.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		r.Close()
		if err := syscall.SetNonblock(fd, false); err != nil { // as a child inherits it
			t.Fatal(err)
		}
		t.Setenv("XPYD_PARENT_FD", strconv.Itoa(fd))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		gone, err := supervise.ParentGone(ctx)
		if err != nil {
			t.Fatal(err)
		}
		end(cancel, w)
		for by := time.Now().Add(patience); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
			if time.Now().After(by) {
				t.Fatal("it still waits for its parent")
			}
		}
		select {
		case <-gone:
			if !want {
				t.Error("fired")
			}
		default:
			if want {
				t.Error("did not fire")
			}
		}
	}
	f(func(_ func(), w *os.File) { w.Close() }, true)
	for range 50 { // it may be just before its read, or in it
		f(func(cancel func(), w *os.File) {
			if _, err := w.Write([]byte("of no account")); err != nil {
				t.Fatal(err)
			}
			cancel()
		}, false)
	}
}
