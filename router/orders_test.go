package router_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// refusal is an error of the admin API.
type refusal struct {
	Error struct{ Message, Param, Code string }
}

// TestLastWorker: an order that would leave a model without a pair is refused unless it
// is forced. One that leaves a pair, or changes nothing, is not.
func TestLastWorker(t *testing.T) {
	g := newRig(t, 1, 2)
	order := func(path, body string, status int) {
		t.Helper()
		var e refusal
		verb := "POST"
		var v any = &e
		if !strings.Contains(path, "/") || strings.Contains(path, "?") {
			verb = "DELETE"
			if status == 204 {
				v = nil
			}
		}
		if got := g.adminJSON(verb, "/admin/v1/instances/"+path, body, v); got != status {
			t.Errorf("%s %s %s: %d %s, want %d", verb, path, body, got, e.Error.Message, status)
		}
		id, _, _ := strings.Cut(path, "/")
		if want := id + " is the last "; status == 409 && (e.Error.Code != "last_worker" || e.Error.Param != "force" ||
			!strings.HasPrefix(e.Error.Message, want) || !strings.Contains(e.Error.Message, "worker that serves m; requests would get 503")) {
			t.Errorf("%s: %+v", path, e)
		}
	}
	serves := func(want bool) {
		t.Helper()
		if g.r.Ready() != want {
			t.Errorf("ready %v, want %v", !want, want)
		}
	}
	order("p0/drain", "", 409)
	order("p0/role", `{"role":"decode"}`, 409)
	order("p0/role", `{"role":"prefill"}`, 200) // as it is
	order("p0", "", 409)
	order("p0/role", `{"role":"cook"}`, 400)
	order("p0/drain", `{"force":1}`, 400)
	serves(true)

	order("d0/drain", "", 200)
	order("d0/drain", "", 200) // it serves nothing that could be lost
	order("d1/drain", "", 409)
	order("d1/role", `{"role":"prefill"}`, 409)
	order("d1", "", 409)
	order("d0/undrain", "", 200)
	order("d1/role", `{"role":"prefill"}`, 200)
	order("d1", "", 204)
	serves(true)

	order("d0/drain", `{"force":true}`, 200)
	serves(false)
	order("p0/drain", "", 200) // nothing is served any more
	order("p0/undrain", "", 200)
	order("d0/undrain", "", 200)
	serves(true)
	order("p0", `{"force":true}`, 204)
	serves(false)
}

// TestAdminBodies: a body that is not understood whole changes nothing, and the answer says what was
// sent and what is wanted.
func TestAdminBodies(t *testing.T) {
	g := newRig(t, 2, 2)
	for _, c := range []struct{ path, body, param, want string }{
		{"/d0/drain", `{"waitOnly":true}`, "waitOnly", `there is no key "waitOnly"`},
		{"/d0/undrain", `{"forced":true}`, "forced", `there is no key "forced"`},
		{"/d0/role", `{"role":"prefill","force ":true}`, "force ", `there is no key "force "`},
		{"/d0/drain", `{"force":"true"}`, "force", `force: want true or false, not "true"`},
		{"/d0/drain", `{"force":true}x`, "", "the body is no JSON object: invalid character 'x'"},
		{"/d0/drain", `{"force":`, "", "the body is no JSON object: unexpected end"},
		{"/d0/drain", `[]`, "", "want a JSON object, not []"},
		{"/d0/drain", `null`, "", "want a JSON object, not null"},
		{"/d0/role", ``, "", "the body is empty: want a JSON object"},
		{"/d0/role", `{"role":5}`, "role", "role: want a string, not 5"},
		{"/d0/role", `{}`, "role", "want prefill or decode"},
		{"", ` `, "", "the body is empty: want a JSON object"},
		{"", `{"id":7}`, "id", "id: want a string, not 7"},
		{"", `{"epoch":1.5}`, "epoch", "epoch: want a whole number such as 3, not 1.5"},
		{"", `{"layout":{"block_tokens":"16"}}`, "layout.block_tokens", "layout.block_tokens: want a whole number such as 3, not string"},
		{"", `{"layout":[1]}`, "layout", "layout: want an object, not [1]"},
		{"", `{"kv_ways":1}`, "kv_ways", "kv_ways: want an object, not 1"},
	} {
		var e refusal
		if got := g.adminJSON("POST", "/admin/v1/instances"+c.path, c.body, &e); got != 400 || e.Error.Param != c.param || !strings.Contains(e.Error.Message, c.want) {
			t.Errorf("%s %s: %d %+v, want %s", c.path, c.body, got, e.Error, c.want)
		}
	}
	if m := g.watcher.Snapshot().Get("d0"); m.Draining || g.r.Members.Drained(m) || m.Role != fleet.Decode {
		t.Errorf("d0 is %+v", m)
	}
}

// TestLastWorkerByModel: another model's workers, and those that are not
// compatible, do not make up for it.
func TestLastWorkerByModel(t *testing.T) {
	g := newRig(t, 1, 1)
	g.add("other-p", fleet.Prefill, func(i *fleet.Instance) { i.Model = "other" })
	g.add("other-d", fleet.Decode, func(i *fleet.Instance) { i.Model = "other" })
	g.add("new-d", fleet.Decode, func(i *fleet.Instance) { i.Numerics = "new" })
	g.until("the other model to be probed", func() bool {
		s := g.watcher.Snapshot()
		return g.r.Members.Serves(s.Get("other-p")) && g.r.Members.Serves(s.Get("other-d"))
	})
	for _, id := range []string{"p0", "d0", "other-p", "other-d"} {
		if got := g.adminJSON("POST", "/admin/v1/instances/"+id+"/drain", "", nil); got != 409 {
			t.Errorf("%s: %d", id, got)
		}
	}
	if got := g.adminJSON("POST", "/admin/v1/instances/new-d/drain", "", nil); got != 200 {
		t.Errorf("one that serves nothing: %d", got)
	}
}

// TestLastTwo: of the last two workers of a role, drained at the same time, one
// stays.
func TestLastTwo(t *testing.T) {
	g := newRig(t, 1, 2)
	var wg sync.WaitGroup
	got := make([]int, 2)
	for i := range got {
		wg.Go(func() {
			got[i] = g.adminJSON("POST", fmt.Sprintf("/admin/v1/instances/d%d/drain", i), "", nil)
		})
	}
	wg.Wait()
	if got[0]+got[1] != 200+409 {
		t.Errorf("%v", got)
	}
}

// TestRoleWhileTurning: a worker whose role is being changed is not counted on.
func TestRoleWhileTurning(t *testing.T) {
	g := newRig(t, 1, 2)
	asked, goOn := make(chan struct{}), make(chan struct{})
	d := g.workers["d0"]
	d.on(&d.other, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/role") {
			close(asked)
			<-goOn
		}
		whole(w, r)
	})
	done := make(chan int, 1)
	go func() {
		done <- g.adminJSON("POST", "/admin/v1/instances/d0/role", `{"role":"prefill"}`, nil)
	}()
	<-asked
	if got := g.adminJSON("POST", "/admin/v1/instances/d1/drain", "", nil); got != 409 {
		t.Errorf("the other one: %d", got)
	}
	close(goOn)
	if got := <-done; got != 200 {
		t.Errorf("%d", got)
	}
	if g.r.Members.DrainAsked("d0") {
		t.Error("still marked")
	}
}

// TestOrderWaits: an order for a worker that is starting waits until the worker is there
// or has failed to start.
func TestOrderWaits(t *testing.T) {
	g := newRig(t, 1, 1)
	begin := func(id string) chan int {
		asked := make(chan struct{})
		once := sync.OnceFunc(func() { close(asked) })
		g.coming.Store(new(func(name string) bool { once(); return name == id }))
		done := make(chan int, 1)
		go func() { done <- g.adminJSON("POST", "/admin/v1/instances/"+id+"/role", `{"role":"decode"}`, nil) }()
		<-asked
		return done
	}
	there, at := begin("p1"), time.Now()
	g.add("p1", fleet.Prefill)
	if got, took := <-there, time.Since(at); got != 200 || took > 20*time.Second {
		t.Errorf("%d after %v", got, took)
	}
	never := begin("p2")
	g.coming.Store(nil)
	if got := <-never; got != 404 {
		t.Errorf("%d", got)
	}
	if got := g.adminJSON("POST", "/admin/v1/instances/p3/role", `{"role":"decode"}`, nil); got != 404 {
		t.Errorf("%d", got)
	}
}

// TestDrainOutlastsACrash: it goes on where the worker's next process begins with
// it, and ends where the worker left, or starts afresh.
func TestDrainOutlastsACrash(t *testing.T) {
	g := newRig(t, 1, 2)
	inst := g.workers["d0"].inst
	again := func(draining bool) {
		t.Helper()
		inst.Epoch++
		inst.Draining = draining
		if err := g.watcher.AddStatic(inst, fleet.Static); err != nil {
			t.Fatal(err)
		}
	}
	drained := func(want bool) {
		t.Helper()
		g.until(fmt.Sprintf("drained to be %v", want), func() bool { return g.r.Members.DrainAsked("d0") == want })
	}
	if got := g.adminJSON("POST", "/admin/v1/instances/d0/drain", "", nil); got != 200 {
		t.Fatal(got)
	}
	g.watcher.ReportDead("d0", inst.Epoch, "crash")
	drained(true)
	again(true)
	g.until("its mark to follow it", func() bool {
		return g.r.Members.DrainAsked("d0") && !g.r.Members.Serves(g.watcher.Snapshot().Get("d0"))
	})
	again(false)
	drained(false)
	if got := g.adminJSON("POST", "/admin/v1/instances/d0/drain", "", nil); got != 200 {
		t.Fatal(got)
	}
	g.watcher.Remove("d0", "leaves")
	drained(false)
}

// TestForeignOrders: the drain of an engine is the router's, and it has no role
// to change.
func TestForeignOrders(t *testing.T) {
	g := newRig(t, 1, 1)
	e := g.add("e0", fleet.Decode, func(i *fleet.Instance) { i.Dialect = "openai" })
	e.on(&e.other, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(404) })
	for path, want := range map[string]int{"drain": 200, "undrain": 200, "role": 400} {
		if got := g.adminJSON("POST", "/admin/v1/instances/e0/"+path, `{"role":"prefill"}`, nil); got != want {
			t.Errorf("%s: %d, want %d", path, got, want)
		}
	}
}

// TestOrderFails: a worker breaks while it is told what to do.
func TestOrderFails(t *testing.T) {
	g := newRig(t, 1, 2)
	d := g.workers["d0"]
	d.on(&d.other, reset)
	var said struct{ Error struct{ Message string } }
	if got := g.adminJSON("POST", "/admin/v1/instances/d0/drain", "", &said); got != 502 || !strings.Contains(said.Error.Message, "until undrain") {
		t.Errorf("%d: %s", got, said.Error.Message)
	}
	if err := g.r.Console.Leave(g.watcher.Snapshot().Get("d0")); err == nil || !strings.HasPrefix(err.Error(), "drain d0: ") {
		t.Errorf("it leaves: %v", err)
	}
	d.on(&d.other, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) })
	if err := g.r.Console.Leave(g.watcher.Snapshot().Get("d0")); err == nil || err.Error() != "drain d0: status 503" {
		t.Errorf("it leaves, and refuses: %v", err)
	}
	d.on(&d.other, whole)
	if err := g.r.Console.Leave(g.watcher.Snapshot().Get("d0")); err != nil {
		t.Errorf("it leaves: %v", err)
	}
	for range 4 { // it is drained here all the same
		if resp, _ := g.post("/v1/completions", ask); resp.Header.Get("x-xpyd-decode") != "d1" {
			t.Errorf("%d from %s", resp.StatusCode, resp.Header.Get("x-xpyd-decode"))
		}
	}
}
