package main

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/gpus"
	"github.com/xpyd/xpyd/internal/gpus/gpustest"
	"github.com/xpyd/xpyd/internal/supervise"
	"github.com/xpyd/xpyd/router/steer"
)

// fakeMachine has n fake GPUs, on two NUMA nodes if nodes says so.
func fakeMachine(n int, visible string, nodes ...int) machine {
	env := map[string]string{}
	if visible != "" {
		env[gpus.VisibleEnv] = visible
	}
	var sys fs.FS = gpustest.FakeSys([]string{"0-3", "4-7"}, nodes...)
	return machine{gpustest.FakeNVML(n), gpustest.Env(env), sys}
}

// upOn is an `up` with those GPUs.
func upOn(choice string, prefill, decode int) *upConfig {
	w := workerDefaults(fleet.Prefill)
	c := &upConfig{RouterConfig: defaultRouterConfig(), Prefill: max(prefill, 1), Decode: max(decode, 1), TensorParallel: ranks{1, 1}, GPUs: choice, Compute: w.Compute, KV: w.KV}
	return c
}

// TestPlaceRanks: workers of several ranks have as many GPUs, of one NUMA node where they can.
func TestPlaceRanks(t *testing.T) {
	machine := fakeMachine(8, "", 0, 0, 0, 0, 1, 1, 1, 1)
	f := func(choice string, tp ranks, want string, args ...string) {
		t.Helper()
		c := upOn(choice, 0, 0)
		c.TensorParallel = tp
		p, err := c.place(machine, func(string) bool { return false })
		if err != nil {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s by %v: %v, want %s", choice, tp, err, want)
			}
			return
		}
		if got := fmt.Sprintf("%dP%dD", c.Prefill, c.Decode); got != want {
			t.Errorf("%s by %v: %s, want %s", choice, tp, got, want)
		}
		for i, want := range args {
			role, name, _ := strings.Cut(want, " ")
			name, want, _ = strings.Cut(name, " ")
			got, err := p.Take(role, name)
			text := strings.Join(got, " ")
			for g := range 8 {
				text = strings.ReplaceAll(text, gpustest.UUID(g), fmt.Sprint(g))
			}
			if err != nil || text != want {
				t.Errorf("%s by %v: worker %d has %q, want %q, %v", choice, tp, i, text, want, err)
			}
		}
	}
	f("all", ranks{2, 2}, "2P2D", "prefill p0 --device cuda:0,cuda:1", "prefill p1 --device cuda:4,cuda:5", "decode d0 --device cuda:2,cuda:3", "decode d1 --device cuda:6,cuda:7")
	f("all", ranks{4, 4}, "1P1D", "prefill p0 --device cuda:0,cuda:1,cuda:2,cuda:3", "decode d0 --device cuda:4,cuda:5,cuda:6,cuda:7")
	f("all", ranks{1, 4}, "4P1D")
	f("6", ranks{2, 2}, "1P2D")
	f("all", ranks{8, 8}, "take 16 GPUs, and there is room for 8")
	f("cuda:0", ranks{2, 2}, "take 4 GPUs, and there is room for 1")
	f("cuda:0,cuda:0,cuda:1", ranks{2, 1}, "1P1D", "prefill p0 --device cuda:0,cuda:1 --gpu-memory 0.45", "decode d0 --device cuda:0 --gpu-memory 0.45")
	f("cuda:0,cuda:0,cuda:1,cuda:1", ranks{2, 2}, "1P1D", "prefill p0 --device cuda:0,cuda:1 --gpu-memory 0.45", "decode d0 --device cuda:0,cuda:1 --gpu-memory 0.45")
	f("cuda:0,cuda:0,cuda:1", ranks{1, 2}, "1P1D", "decode d0 --device cuda:0,cuda:1 --gpu-memory 0.45")
	f("cuda:3,cuda:3", ranks{1, 1}, "1P1D", "prefill p0 --device cuda:3 --gpu-memory 0.45")
}

// TestPlace: how many workers of each role there are on so many GPUs, and how large a part each has.
func TestPlace(t *testing.T) {
	f := func(m machine, choice string, prefill, decode int, want string) {
		t.Helper()
		c := upOn(choice, prefill, decode)
		p, err := c.place(m, func(key string) bool { return key == "prefill" && prefill > 0 || key == "decode" && decode > 0 })
		got := fmt.Sprintf("%dP%dD", c.Prefill, c.Decode)
		if p != nil {
			got += fmt.Sprintf(" of %d", p.seats.Len())
		}
		if err != nil {
			got = err.Error()
		}
		if got != want && (err == nil || !strings.Contains(got, want)) {
			t.Errorf("%q for %d and %d: %s, want %s", choice, prefill, decode, got, want)
		}
	}
	eight := fakeMachine(8, "")
	f(eight, "", 0, 0, "1P1D") // as ever
	f(eight, "", 3, 2, "3P2D")
	f(eight, "all", 0, 0, "4P4D of 8")
	f(eight, "5", 0, 0, "2P3D of 5")
	f(eight, "2", 0, 0, "1P1D of 2")
	f(eight, "1", 0, 0, "1P1D of 2") // which the pair shares
	f(eight, "cuda:3", 0, 0, "1P1D of 2")
	f(eight, "cuda:0,cuda:0,cuda:1", 0, 0, "1P2D of 3")
	f(eight, "all", 2, 0, "2P6D of 8")
	f(eight, "all", 0, 7, "1P7D of 8")
	f(eight, "all", 1, 1, "1P1D of 8") // the rest is for xpyd scale
	f(eight, "4", 3, 2, "gpus: 4: 3 prefill and 2 decode workers with tensor_parallel 1 take 5 GPUs, and there is room for 4: to have two ranks share a GPU, name it twice")
	f(eight, "4", 4, 0, "gpus: 4: 4 prefill and 1 decode workers with tensor_parallel 1 take 5 GPUs")
	f(eight, "1", 2, 2, "gpus: 1: 2 prefill and 2 decode workers with tensor_parallel 1 take 4 GPUs")
	f(eight, "9", 0, 0, "gpus: 9 GPUs are too many: there are cuda:0, ")
	f(eight, "cuda:8", 0, 0, "gpus: cuda:8: there is no such GPU")
	f(fakeMachine(8, "6,7"), "all", 0, 0, "1P1D of 2")
	f(fakeMachine(8, "6,7"), "cuda:0,cuda:7", 0, 0, "gpus: cuda:0: CUDA_VISIBLE_DEVICES=6,7 hides it; it leaves cuda:6, cuda:7")
	f(fakeMachine(200, ""), "all", 0, 0, "gpus: 200 are for more than 64 workers of a role")
	none := machine{gpustest.NoNVML, gpustest.Env(nil), eight.sys}
	f(none, "all", 0, 0, "gpus: all: no GPU is found. Looked for GPUs of NVIDIA's driver (NVML is not available: libnvidia-ml.so.1 is not there)")
	f(none, "all", 0, 0, "libxpyd_cuda.so (")
	f(none, "", 0, 0, "1P1D")
}

// TestPlaceValid: what is wrong with --gpus without a look at the machine.
func TestPlaceValid(t *testing.T) {
	f := func(choice, device, want string) {
		t.Helper()
		c := upOn(choice, 1, 1)
		c.Device = device
		err := c.Validate()
		if (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s on %s: %v, want %q", choice, device, err, want)
		}
	}
	f("", "cuda:1", "")
	f("all", "auto", "")
	f("cuda:0,cuda:2", "cuda", "")
	f("all", "cpu", "it and device cpu exclude each other")
	f("all", "cuda:1", "it and device cuda:1 exclude each other")
	f("0,2", "auto", "write cuda:0,cuda:2")
	f("", "cuda:0,cuda:1", "2 GPUs for tensor_parallel 1")
}

// TestPlaceArgs: a worker's GPU is in its arguments, by UUID, with its part of the memory if others share
// it; without --gpus all divide one GPU by the environment.
func TestPlaceArgs(t *testing.T) {
	c := upOn("cuda:1,cuda:1,cuda:0", 1, 2)
	c.GPUMemory = 0.8
	p, err := c.place(fakeMachine(2, ""), func(string) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	shared, own := []string{"--device", "cuda:" + gpustest.UUID(1), "--gpu-memory", "0.4"}, []string{"--device", "cuda:" + gpustest.UUID(0)}
	for _, who := range []struct {
		role, name string
		want       []string
	}{{"prefill", "prefill-0", shared}, {"decode", "decode-0", own}, {"decode", "decode-1", shared}} {
		if got, err := p.Take(who.role, who.name); err != nil || !slices.Equal(got, who.want) {
			t.Errorf("%s: %q, %v, want %q", who.name, got, err, who.want)
		}
	}
	env, err := c.environ(nil)
	if err != nil || slices.ContainsFunc(env, func(v string) bool { return strings.HasPrefix(v, "XPYD_GPUS=") || strings.HasPrefix(v, "XPYD_DEVICE=") }) ||
		!slices.Contains(env, "XPYD_GPU_MEMORY=0.8") {
		t.Errorf("the workers are told %q, %v", env, err)
	}
	c.GPUs = ""
	if env, err = c.environ(nil); err != nil || !slices.Contains(env, "XPYD_GPU_MEMORY=0.26666666666666666") {
		t.Errorf("without --gpus the workers are told %q, %v", env, err)
	}
	_, told := inForce(t, append([]string{"decode", "--join-file", "/j"}, shared...)...)
	if !strings.Contains(told["device"], gpustest.UUID(1)) || !strings.Contains(told["gpu_memory"], "0.4") {
		t.Errorf("a worker has %s and %s", told["device"], told["gpu_memory"])
	}
}

// TestPlaceBudget: a planner that acts wants no more workers than there are GPUs for; one that advises may.
func TestPlaceBudget(t *testing.T) {
	f := func(mode string, least, want int, wrong string) {
		t.Helper()
		c := upOn("3", 1, 1)
		c.Planner.Mode, c.Planner.Prefill.Min = mode, least
		p, err := c.place(fakeMachine(8, ""), func(string) bool { return true })
		if (err != nil) != (wrong != "") || err != nil && !strings.Contains(err.Error(), wrong) {
			t.Errorf("%s: %v, want %q", mode, err, wrong)
		}
		if err == nil && c.Planner.Budget != want {
			t.Errorf("%s: the budget is %d, want %d", mode, c.Planner.Budget, want)
		}
		again := defaultRouterConfig() // a reload
		again.Planner.Mode = mode
		if p.bound(&again); err == nil && again.Planner.Budget != want {
			t.Errorf("%s: read again, the budget is %d, want %d", mode, again.Planner.Budget, want)
		}
	}
	f(steer.Act, 1, 3, "")
	f(steer.Advise, 1, 8, "")
	f(steer.Act, 3, 0, "planner.prefill.min and planner.decode.min are workers for 4 GPUs together, and there are 3")
}

// fakeLauncher starts processes that run until they are told to end, and keeps their arguments.
type fakeLauncher struct{ started chan *fakeProcess }

type fakeProcess struct {
	args []string
	exit chan supervise.Exit
}

func (l fakeLauncher) Launch(s supervise.Spec) (supervise.Process, error) {
	p := &fakeProcess{args: s.Args, exit: make(chan supervise.Exit, 1)}
	l.started <- p
	return p, nil
}
func (p *fakeProcess) PID() int             { return 1 }
func (p *fakeProcess) Wait() supervise.Exit { return <-p.exit }
func (p *fakeProcess) AwaitDying(ctx context.Context) bool {
	<-ctx.Done()
	return false
}
func (p *fakeProcess) Terminate() error { return p.end(0) }
func (p *fakeProcess) Kill() error      { return p.end(-1) }
func (p *fakeProcess) end(code int) error {
	select {
	case p.exit <- supervise.Exit{Code: code}:
	default:
	}
	return nil
}

// on is the index of the fake GPU that a process was told to take.
func (p *fakeProcess) on(t *testing.T) string {
	i := slices.Index(p.args, "--device")
	if i < 0 || slices.Index(p.args[i+1:], "--device") >= 0 {
		t.Fatalf("not one device in %q", p.args)
	}
	for n := range 8 {
		if p.args[i+1] == "cuda:"+gpustest.UUID(n) {
			return fmt.Sprint(p.args[2], " ", n)
		}
	}
	t.Fatalf("no device of ours in %q", p.args)
	return ""
}

// TestHint: only who has several GPUs and said nothing of them is told.
func TestHint(t *testing.T) {
	f := func(m machine, choice, device string, want bool) {
		t.Helper()
		c := upOn(choice, 1, 1)
		c.Device = device
		if got := c.hint(m); (got != "") != want || want && got != "all workers share one of 4 GPUs; with --gpus all each has its own\n" {
			t.Errorf("--gpus %q --device %s: %q", choice, device, got)
		}
	}
	four := fakeMachine(4, "")
	f(four, "", "auto", true)
	f(four, "", "cuda", true)
	f(four, "1", "auto", false)
	f(four, "", "cuda:2", false)
	f(fakeMachine(4, "2"), "", "auto", false)
	f(machine{gpustest.NoNVML, gpustest.Env(nil), four.sys}, "", "auto", false)
}

// TestScaleNoGPU: an order for which no GPU is free is a 409 that says who has which.
func TestScaleNoGPU(t *testing.T) {
	placed, err := upOn("2", 1, 1).place(fakeMachine(2, ""), func(string) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	role := func(role string) func(int) supervise.Child {
		return func(i int) supervise.Child {
			return supervise.Child{Name: fmt.Sprintf("%s-%d", role, i), Role: role, Args: []string{role}}
		}
	}
	l := fakeLauncher{make(chan *fakeProcess, 16)}
	sup, err := supervise.New(supervise.Config{Seats: placed, Launcher: l, Templates: map[string]func(int) supervise.Child{"prefill": role("prefill"), "decode": role("decode")}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := sup.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	s := &scaler{}
	s.sup.Store(sup)
	f := func(body string, status int, want ...string) {
		t.Helper()
		var ctx fasthttp.RequestCtx
		ctx.Request.Header.SetMethod("POST")
		ctx.Request.SetBodyString(body)
		s.serve(&ctx)
		got := string(ctx.Response.Body())
		if ctx.Response.StatusCode() != status {
			t.Errorf("%s: %d %s", body, ctx.Response.StatusCode(), got)
		}
		for _, w := range want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: no %s in %s", body, w, got)
			}
		}
	}
	f(`{"prefill":1,"decode":1}`, 200, `"added":["decode-0"]`)
	f(`{"decode":2}`, 409, "no GPU is free for decode-1: cuda:0 has prefill-0, cuda:1 has decode-0", `"code":"no_gpu_free"`, "xpyd role")
	f(`{"decode":1}`, 200, `"added":[]`, `"kept":["decode-0"]`)
}

// TestPlaceWorkers: the workers of an `up` with fake GPUs: at the start, when one crashes, when its role was
// changed, and when they are scaled, and whom it refuses.
func TestPlaceWorkers(t *testing.T) { synctest.Test(t, testPlaceWorkers) }

func testPlaceWorkers(t *testing.T) {
	c := upOn("all", 0, 0)
	placed, err := c.place(fakeMachine(4, "", 0, 0, 1, 1), func(string) bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	w, err := fleet.Watch(fleet.WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	l := fakeLauncher{make(chan *fakeProcess, 16)}
	kept := &lastRoles{}
	child := func(role fleet.Role) func(int) supervise.Child {
		return func(i int) supervise.Child {
			id := fmt.Sprintf("%s-%d", role, i)
			args := []string{string(role), "--id", id}
			return supervise.Child{Name: id, Role: string(role), Args: args, Again: kept.restart(w, func(string) bool { return false }, id, args)}
		}
	}
	sup, err := supervise.New(supervise.Config{Seats: placed, Launcher: l, BackoffMin: time.Millisecond, Templates: map[string]func(int) supervise.Child{
		"prefill": child(fleet.Prefill), "decode": child(fleet.Decode)}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := sup.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	running := map[string]*fakeProcess{}
	starts := func(want ...string) {
		t.Helper()
		var got []string
		for time.Sleep(time.Second); len(l.started) > 0; { // after a back-off
			p := <-l.started
			running[p.args[2]] = p
			got = append(got, p.on(t))
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("started %q, want %q", got, want)
		}
	}
	scale := func(prefill, decode int, wrong string) {
		t.Helper()
		done, err := sup.Scale(map[string]int{"prefill": prefill, "decode": decode}, nil)
		if (err != nil) != (wrong != "") || err != nil && !strings.Contains(err.Error(), wrong) {
			t.Errorf("%+v, %v, want %q", done, err, wrong)
		}
	}
	scale(c.Prefill, c.Decode, "")
	starts("decode-0 1", "decode-1 3", "prefill-0 0", "prefill-1 2")
	scale(2, 3, "no GPU is free for decode-2: cuda:0 has prefill-0, cuda:1 has decode-0, cuda:2 has prefill-1, cuda:3 has decode-1")
	scale(1, 3, "no GPU is free") // the one that would go has its GPU until it has ended: it stays
	if n := len(sup.Status()); n != 4 {
		t.Errorf("%d workers after orders that were refused", n)
	}

	if err := running["decode-0"].end(1); err != nil { // it crashes
		t.Fatal(err)
	}
	starts("decode-0 1")
	if err := w.AddStatic(fleet.Instance{ID: "prefill-1", Epoch: 1, Role: fleet.Decode, URL: "http://127.0.0.1:1", Dialect: "native", PID: 1}, fleet.Static); err != nil {
		t.Fatal(err)
	}
	if err := running["prefill-1"].end(1); err != nil { // as one that was given another role
		t.Fatal(err)
	}
	starts("prefill-1 2")
	if p := running["prefill-1"]; p.args[0] != "decode" {
		t.Errorf("%q after the change of its role", p.args)
	}

	scale(1, 2, "") // who began in another role goes first
	starts()
	scale(2, 2, "")
	starts("prefill-1 2")
}
