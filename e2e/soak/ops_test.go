package soak

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// op is something that is done to the fleet. After each the fleet is as before.
type op struct {
	name string
	// breaks: requests that run meanwhile may fail, with a status or an error
	// event. Of the others none may.
	breaks bool
	do     func(s *scene, t *testing.T, rng *rand.Rand) error
}

var ops = []op{
	{"kill a prefill worker", true, kill(fleet.Prefill, syscall.SIGKILL)},
	{"kill a decode worker", true, kill(fleet.Decode, syscall.SIGKILL)},
	{"stop a prefill worker", true, kill(fleet.Prefill, syscall.SIGSTOP)},
	{"stop a decode worker", true, kill(fleet.Decode, syscall.SIGSTOP)},
	{"scale up and down", false, scale},
	{"drain and undrain", false, drain},
	{"role and back", false, role},
	{"NATS cut at the router", false, cut(routerSide)},
	{"NATS cut at the workers", false, cut(workersSide)},
	{"NATS server restarted", false, restartNATS},
	{"no file descriptors at the router", true, noDescriptors},
	{"no memory for a decode worker", true, noMemory},
	{"answers too large are asked for", false, tooLarge},
}

// run is one op that was done.
type run struct {
	op
	begin, end time.Time // until the fleet is as before
}

// explains reports whether a failure may be this op's doing: not if the request
// just hung, or its stream ended without a word.
func (r *run) explains(f *failure) bool {
	silent := f.Status == 200 && f.Problem == "" && f.Err != nil
	return r.breaks && !silent && f.End.Sub(f.Start) < slowest-time.Second && f.Start.Before(r.end) && f.End.After(r.begin)
}

func pickOf(rng *rand.Rand, role fleet.Role) string { return fmt.Sprintf("%s-%d", role, rng.IntN(2)) }

// kill sends a worker of `up` a signal that ends it: SIGSTOP by way of `up`,
// which kills who is silent.
func kill(role fleet.Role, signal syscall.Signal) func(*scene, *testing.T, *rand.Rand) error {
	return func(s *scene, _ *testing.T, rng *rand.Rand) error {
		children, err := s.Children()
		if err != nil {
			return err
		}
		id := pickOf(rng, role)
		pid := children[id].PID
		if pid == 0 {
			return errors.New("no such child")
		}
		if err := syscall.Kill(pid, signal); err != nil {
			return err
		}
		return s.replaced(id, pid)
	}
}

// cli runs a command of an operator; exit codes other than 0 are errors.
func (s *scene) cli(t *testing.T, args ...string) error {
	if out, errs, code := s.CLI(t, args...); code != 0 {
		return fmt.Errorf("%v: exit code %d: %s%s", args, code, out, errs)
	}
	return nil
}

// counts waits until `up`'s workers and the two others serve.
func (s *scene) counts(prefill, decode int) error {
	return cluster.Poll(30*time.Second, func() error { return s.ServingIs(prefill+1, decode+1) })
}

func scale(s *scene, t *testing.T, _ *rand.Rand) error {
	return errors.Join(s.cli(t, "scale", "prefill=3", "decode=3"), s.counts(3, 3), s.cli(t, "scale", "prefill=2", "decode=2"), s.counts(2, 2))
}

func drain(s *scene, t *testing.T, rng *rand.Rand) error {
	p, d := pickOf(rng, fleet.Prefill), pickOf(rng, fleet.Decode)
	return errors.Join(s.cli(t, "drain", d), s.counts(2, 1), s.cli(t, "drain", p), s.counts(1, 1),
		s.cli(t, "undrain", d), s.cli(t, "undrain", p), s.counts(2, 2))
}

func role(s *scene, t *testing.T, rng *rand.Rand) error {
	p := pickOf(rng, fleet.Prefill)
	return errors.Join(s.cli(t, "role", p, "decode"), s.counts(1, 3), s.cli(t, "role", p, "prefill"), s.counts(2, 2))
}

// longerThanSilence is how long NATS is away: whoever could be believed dead of
// silence would be.
const longerThanSilence = 5 * time.Second

func cut(who side) func(*scene, *testing.T, *rand.Rand) error {
	return func(s *scene, _ *testing.T, _ *rand.Rand) error {
		s.wire.set(who, true)
		time.Sleep(longerThanSilence)
		s.wire.set(who, false)
		time.Sleep(longerThanSilence) // nobody may die of what was missed, either
		return nil
	}
}

func restartNATS(s *scene, t *testing.T, _ *rand.Rand) error {
	s.nats.Kill()
	time.Sleep(longerThanSilence)
	s.nats.Restart(s.t) // it outlives this op
	return nil
}

// noDescriptors leaves the router few descriptors and takes them by idle
// connections; all have gone when it has them back.
func noDescriptors(s *scene, _ *testing.T, _ *rand.Rand) error {
	pid := s.PID()
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return err
	}
	var was unix.Rlimit
	low := unix.Rlimit{Cur: uint64(len(open) + 8)}
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &was); err != nil {
		return err
	}
	low.Max = was.Max
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, &low, nil); err != nil {
		return err
	}
	var idle []net.Conn
	for _, url := range []string{s.URL, s.Admin} {
		for range 40 {
			if c, err := net.DialTimeout("tcp", strings.TrimPrefix(url, "http://"), time.Second); err == nil {
				idle = append(idle, c)
			}
		}
	}
	time.Sleep(2 * time.Second)
	for _, c := range idle {
		c.Close()
	}
	return unix.Prlimit(pid, unix.RLIMIT_NOFILE, &was, nil)
}

// noMemory has the kernel kill a decode worker that is over a control group's
// limit. Where no such group can be made it is killed.
func noMemory(s *scene, t *testing.T, rng *rand.Rand) error {
	const root = "/sys/fs/cgroup/memory"
	children, err := s.Children()
	if err != nil {
		return err
	}
	id := pickOf(rng, fleet.Decode)
	pid := children[id].PID
	group := filepath.Join(root, fmt.Sprintf("xpyd-soak-%d", pid))
	if err := os.Mkdir(group, 0o755); err != nil {
		return errors.Join(syscall.Kill(pid, syscall.SIGKILL), s.replaced(id, pid))
	}
	defer func() {
		if err := cluster.Poll(5*time.Second, func() error { return os.Remove(group) }); err != nil {
			t.Logf("%s is left: %v", group, err)
		}
	}()
	for file, text := range map[string]string{"memory.swappiness": "0", "cgroup.procs": strconv.Itoa(pid)} {
		if err := os.WriteFile(filepath.Join(group, file), []byte(text), 0); err != nil && file == "cgroup.procs" {
			return err
		}
	}
	// What it has stays where it is charged, so a limit of nearly nothing takes
	// effect with the next pages.
	// It may be refused, where not enough can be taken back at once.
	err = os.WriteFile(filepath.Join(group, "memory.limit_in_bytes"), []byte("65536"), 0)
	if err == nil {
		err = s.dead(pid)
	}
	if err != nil {
		t.Logf("not killed for want of memory: %v", err)
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			return err
		}
	}
	return s.replaced(id, pid)
}

// dead waits until a process has ended.
func (s *scene) dead(pid int) error {
	return cluster.Poll(10*time.Second, func() error {
		if cluster.Alive(pid) {
			return fmt.Errorf("pid %d lives", pid)
		}
		return nil
	})
}

// replaced waits until another process is the worker of that name.
func (s *scene) replaced(id string, pid int) error {
	return errors.Join(s.dead(pid), cluster.Poll(20*time.Second, func() error {
		f, err := s.Fleet()
		if err != nil {
			return err
		}
		if m := f.Get(id); m == nil || m.PID == pid {
			return fmt.Errorf("%s is still %d", id, pid)
		}
		return nil
	}))
}

// tooLarge asks for answers that nobody could hold: each is a 400 at once, and
// nobody else notices.
func tooLarge(s *scene, t *testing.T, _ *rand.Rand) error {
	prompts := make([]string, 32)
	for i := range prompts {
		prompts[i] = `"Once"`
	}
	body := `{"model":"stories260k","n":128,"logprobs":20,"max_tokens":400,"ignore_eos":true,"temperature":1,"prompt":[` + strings.Join(prompts, ",") + `]}`
	client := cluster.NewClient(t)
	for range 20 {
		resp, err := client.Post(s.URL+"/v1/completions", "application/json", strings.NewReader(body))
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			return fmt.Errorf("an answer too large: status %d", resp.StatusCode)
		}
	}
	return nil
}
