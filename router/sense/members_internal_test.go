package sense

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
)

// TestForgetMarks: a drain goes on for the epoch that it was given to, and for a later
// one that its worker began drained.
func TestForgetMarks(t *testing.T) {
	for name, c := range map[string]struct {
		members []fleet.Member
		want    uint64 // zero: forgotten
	}{
		"same epoch":           {[]fleet.Member{{Instance: fleet.Instance{ID: "d0", Epoch: 3}, State: fleet.Live}}, 3},
		"dead":                 {[]fleet.Member{{Instance: fleet.Instance{ID: "d0", Epoch: 3}, State: fleet.Dead}}, 3},
		"next epoch, drained":  {[]fleet.Member{{Instance: fleet.Instance{ID: "d0", Epoch: 4, Draining: true}, State: fleet.Live}}, 4},
		"next epoch":           {[]fleet.Member{{Instance: fleet.Instance{ID: "d0", Epoch: 4}, State: fleet.Live}}, 0},
		"older epoch, drained": {[]fleet.Member{{Instance: fleet.Instance{ID: "d0", Epoch: 2, Draining: true}, State: fleet.Live}}, 0},
		"gone":                 {[]fleet.Member{{Instance: fleet.Instance{ID: "d0", Epoch: 3}, State: fleet.Gone}}, 0},
		"gone, drained":        {[]fleet.Member{{Instance: fleet.Instance{ID: "d0", Epoch: 3, Draining: true}, State: fleet.Gone}}, 0},
		"left":                 {nil, 0},
	} {
		r := &Members{marked: map[string]mark{"d0": {epoch: 3, stays: true}}}
		r.forgetMarks(fleet.NewSnapshot(1, time.Now(), c.members))
		if got, ok := r.marked["d0"]; ok != (c.want != 0) || got.epoch != c.want || ok && !got.stays {
			t.Errorf("%s: %+v, %t", name, got, ok)
		}
		if forgot := r.marks == 1; forgot != (c.want == 0) {
			t.Errorf("%s: marked %d times", name, r.marks)
		}
	}
}

// TestLeaving: an order given here counts before what a worker announces, for its epoch, until it
// is taken back; the places for moves outlast other changes.
func TestLeaving(t *testing.T) {
	w := watch(t)
	ms := NewMembers(MembersDeps{Fleet: w, Picker: pick.New(pick.Config{Policy: pick.RoundRobin}, nil)})
	inst := fleet.Instance{ID: "d0", Epoch: 1, Role: fleet.Decode, URL: "http://127.0.0.1:1", KVAddr: "127.0.0.1:1", Dialect: fleet.Native, Model: "m", MaxModelLen: 8}
	announce := func(epoch uint64, draining, waitOnly bool) {
		t.Helper()
		inst.Epoch, inst.Draining, inst.WaitOnly = epoch, draining, waitOnly
		if err := w.AddStatic(inst, fleet.Static); err != nil {
			t.Fatal(err)
		}
		ms.mu.Lock()
		ms.findLeaving()
		ms.mu.Unlock()
	}
	step := 0
	is := func(want bool) {
		t.Helper()
		if step++; ms.Leaving(&inst) != nil != want {
			t.Errorf("step %d: leaving %t", step, !want)
		}
	}
	announce(1, false, false)
	is(false)
	announce(1, true, false)
	is(true)
	announce(1, true, true)
	is(false)
	ms.Mark("d0", 1, false)
	is(true)
	for range maxMoves {
		if !ms.Leaving(&inst).Begin() {
			t.Error("no place")
		}
	}
	announce(1, true, false)
	if ms.Leaving(&inst).Begin() {
		t.Error("one place too many")
	}
	ms.Leaving(&inst).End()
	if !ms.Leaving(&inst).Begin() {
		t.Error("no place after one was given back")
	}
	ms.Mark("d0", 1, true)
	is(false)
	announce(1, false, false)
	ms.Mark("d0", 1, false)
	is(true)
	ms.Unmark("d0")
	is(false)
	ms.Mark("d0", 1, false)
	announce(2, false, false)
	is(false)
}

// TestPartner: nobody is probed with a worker that is drained here.
func TestPartner(t *testing.T) {
	ms := NewMembers(MembersDeps{Picker: pick.New(pick.Config{Policy: pick.RoundRobin}, nil), Fleet: &fleet.Watcher{}})
	member := func(id string, role fleet.Role) fleet.Member {
		return fleet.Member{Instance: fleet.Instance{ID: id, Epoch: 1, Role: role, Dialect: fleet.Native, Model: "m"}, State: fleet.Live}
	}
	all := fleet.NewSnapshot(1, time.Now(), []fleet.Member{member("d0", fleet.Decode), member("d1", fleet.Decode), member("p0", fleet.Prefill)})
	ms.state(all.Get("d0")).ok = true
	for _, want := range []string{"d0", "d1", ""} {
		got := ""
		if m := ms.partner(all, all.Get("p0"), 0, time.Now()); m != nil {
			got = m.ID
		}
		if got != want {
			t.Errorf("probed with %q, want %q", got, want)
		}
		ms.marked[want] = mark{epoch: 1}
	}
}

// TestForget: what is known of engines goes with them, also that they only embed.
func TestForget(t *testing.T) {
	ms := NewMembers(MembersDeps{Picker: pick.New(pick.Config{Policy: pick.RoundRobin}, nil), Fleet: &fleet.Watcher{}})
	member := func(id string, state fleet.State) fleet.Member {
		return fleet.Member{Instance: fleet.Instance{ID: id, Epoch: 1, Role: fleet.Decode}, State: state, Source: fleet.Static}
	}
	list := []fleet.Member{member("a", fleet.Live), member("b", fleet.Live), member("c", fleet.Dead), member("d", fleet.Live)}
	for i := range list {
		*ms.state(&list[i]) = probeState{ok: true, embeds: list[i].ID != "d"}
	}
	ms.forget(fleet.NewSnapshot(1, time.Now(), list))
	if got := slices.Sorted(slices.Values(ms.Embedders())); !slices.Equal(got, []string{"a", "b"}) || len(ms.known) != 3 {
		t.Errorf("%v embed, %d are known", got, len(ms.known))
	}
	ms.forget(fleet.NewSnapshot(2, time.Now(), list[1:]))
	if got := ms.Embedders(); !slices.Equal(got, []string{"b"}) || len(ms.known) != 2 {
		t.Errorf("%v embed, %d are known", got, len(ms.known))
	}
}

// TestSuspect: a worker whose connection broke is dead if it takes no new one, unless that is our
// own lack, or it is there and refuses us.
func TestSuspect(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	shut, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	shut.Close()
	for i, c := range []struct {
		at   net.Listener
		err  error
		want fleet.State
	}{
		{ln, io.EOF, fleet.Live}, {shut, io.EOF, fleet.Dead}, {ln, syscall.ECONNREFUSED, fleet.Dead}, {shut, ErrRefusesUs, fleet.Live}, {shut, syscall.EMFILE, fleet.Live},
	} {
		w := watch(t)
		inst := fleet.Instance{ID: "d0", Epoch: 1, Role: fleet.Decode, URL: "http://" + c.at.Addr().String(), Dialect: "openai", Model: "m"}
		if err := w.AddStatic(inst, fleet.Static); err != nil {
			t.Fatal(err)
		}
		ms := NewMembers(MembersDeps{Fleet: w, Picker: pick.New(pick.Config{Policy: pick.RoundRobin}, nil), Client: h1.NewClient(h1.DefaultTimeouts(), h1.Upstream{}, nil),
			Ctx: t.Context(), Spawn: func(f func()) bool { f(); return true }})
		ms.Suspect(&inst, c.err)
		if m := w.Snapshot().Get("d0"); m.State != c.want || ms.Knocking() {
			t.Errorf("%d: %v leaves it %s (%s)", i, c.err, m.State, m.Reason)
		}
	}
}

// TestAsk: any answer counts, and who refuses the connection is reported dead.
func TestAsk(t *testing.T) {
	said := make(chan string, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		said <- r.Method + " " + r.URL.Path
		w.WriteHeader(503)
	}))
	shut := httptest.NewServer(nil)
	shut.Close()
	for _, c := range []struct {
		url, said string
		err       string
		want      fleet.State
	}{
		{srv.URL, "GET /health", "", fleet.Live}, {shut.URL, "", "connect: ", fleet.Dead}, {"http://10.0.0.1", "", "worker URL", fleet.Live},
	} {
		w := watch(t)
		inst := fleet.Instance{ID: "d0", Epoch: 1, Role: fleet.Decode, URL: c.url, Dialect: "openai", Model: "m"}
		if err := w.AddStatic(inst, fleet.Static); err != nil {
			t.Fatal(err)
		}
		ms := bare(t, w)
		ms.Client = h1.NewClient(h1.DefaultTimeouts(), h1.Upstream{}, nil)
		ms.Spawn = func(f func()) bool { f(); return true }
		var l h1.Life
		err := ms.Ask(&l, &inst)
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v", c.url, err)
		}
		got := ""
		select {
		case got = <-said:
		default:
		}
		if m := w.Snapshot().Get("d0"); got != c.said || m.State != c.want {
			t.Errorf("%s is asked %q, and is %s", c.url, got, m.State)
		}
		ms.Client.Close()
	}
	srv.Close()
}

// TestAddress: a worker of the fleet's own is reached as this router reaches them all, others as they say.
func TestAddress(t *testing.T) {
	for _, c := range []struct {
		url, dialect string
		tls          bool
		want, err    string
	}{
		{"http://a:1", "vllm", false, "a:1", ""}, {"http://a:1/x", "vllm", true, "a:1", ""}, {"https://a:1", "vllm", false, "tls:a:1", ""}, {"https://a:1", "vllm", true, "tls:a:1", ""},
		{"http://a:1", fleet.Native, false, "a:1", ""}, {"https://a:1", fleet.Native, true, "member:a:1", ""}, {"https://a:1", fleet.Native, false, "", "this router has no fleet.tls_cert"},
		{"http://a:1", fleet.Native, true, "", "asks for https"}, {"ftp://a:1", fleet.Native, true, "", "begins neither"}, {"http://a", "vllm", false, "", "missing port"},
	} {
		ms := &Members{MembersDeps: MembersDeps{MemberTLS: c.tls}}
		got, err := ms.Address(&fleet.Instance{URL: c.url, Dialect: c.dialect})
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s of %s, TLS %t: %q, %v", c.url, c.dialect, c.tls, got, err)
		}
	}
}

// TestSetStatic: the list becomes the fleet's, what is as it was keeps its epoch, and what cannot be added
// is said and tried again.
func TestSetStatic(t *testing.T) {
	w, err := fleet.Watch(fleet.WatcherConfig{Revoked: []fleet.Revocation{{ID: "c", At: 1}}})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	ms := bare(t, w)
	of := func(id, model string) Static {
		return Static{ID: id, Role: fleet.Decode, URL: "http://127.0.0.1:1", Dialect: "vllm-nixl", Model: model}
	}
	epochs := map[string]uint64{}
	for i, c := range []struct {
		list []Static
		live string // of those that live: the id, and "+" if it is new or another
		err  string
	}{
		{nil, "", ""}, {[]Static{of("a", "m"), of("b", "m")}, "a+ b+", ""}, {[]Static{of("a", "m"), of("b", "m")}, "a b", ""}, {[]Static{of("a", "n"), of("b", "m")}, "a+ b", ""},
		{[]Static{of("a", "n"), of("a", "n")}, "a b", "entry 2"}, {[]Static{of("a", "n"), of("c", "m")}, "a", "revoked"}, {[]Static{of("a", "n"), of("c", "m")}, "a", "revoked"}, {[]Static{of("b", "m"), of("a", "n")}, "a b+", ""}, {nil, "", ""},
	} {
		err := ms.SetStatic(c.list)
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("step %d: %v", i, err)
		}
		var live []string
		for _, m := range w.Snapshot().Members {
			if m.State != fleet.Live {
				delete(epochs, m.ID)
				continue
			}
			if live = append(live, m.ID); epochs[m.ID] != m.Epoch {
				live[len(live)-1] += "+"
			}
			epochs[m.ID] = m.Epoch
		}
		if got := strings.Join(live, " "); got != c.live {
			t.Errorf("step %d: %s, want %s", i, got, c.live)
		}
	}
}

// TestServed: a model is served while somebody decodes it, where workers mix while anybody is left.
func TestServed(t *testing.T) {
	for _, c := range []struct {
		how     string
		role    fleet.Role
		dialect string
		want    bool
	}{{pick.Always, fleet.Decode, "openai", true}, {pick.Always, fleet.Prefill, fleet.Native, false}, {pick.Always, fleet.Decode, fleet.Native, false},
		{pick.Mixed, fleet.Prefill, fleet.Native, true}, {pick.Mixed, fleet.Decode, fleet.Native, true}, {pick.Mixed, fleet.Prefill, "vllm", false}} {
		w := watch(t)
		ms, m := bare(t, w), live("w", c.role, c.dialect)
		ms.Picker = pick.New(pick.Config{Policy: pick.RoundRobin, Disaggregate: c.how}, nil)
		if err := w.AddStatic(m.Instance, fleet.Static); err != nil {
			t.Fatal(err)
		}
		ms.state(&m).ok = true
		ms.publish(func(*probed) {})
		if list, _ := ms.Served(); (len(list) == 1 && list[0].ID == "m") != c.want {
			t.Errorf("%+v: %v", c, list)
		}
	}
}

// TestHasPair: an engine that only embeds counts as a pair until one has generated.
func TestHasPair(t *testing.T) {
	for _, c := range []struct {
		ok, embeds, generated, want bool
	}{{false, false, false, false}, {false, false, true, false}, {true, false, false, true}, {true, false, true, true}, {true, true, false, true}, {true, true, true, false}} {
		w := watch(t)
		ms, d := bare(t, w), live("d0", fleet.Decode, "openai")
		if err := w.AddStatic(d.Instance, fleet.Static); err != nil {
			t.Fatal(err)
		}
		ms.state(&d).ok = c.ok
		ms.publish(func(n *probed) {
			if n.generated = c.generated; c.embeds {
				n.embedders = []string{"d0"}
			}
		})
		if got := ms.HasPair(); got != c.want {
			t.Errorf("%+v: %t", c, got)
		}
		if list, known := ms.Served(); known["m"] != c.ok || (len(list) == 1) != c.ok || ms.OnlyEmbeds(w.Snapshot(), "m") != c.embeds || ms.OnlyEmbeds(w.Snapshot(), "n") {
			t.Errorf("%+v: %v, %v", c, list, known)
		}
		other := live("d1", fleet.Decode, "openai")
		if err := w.AddStatic(other.Instance, fleet.Static); err != nil {
			t.Fatal(err)
		}
		if ms.OnlyEmbeds(w.Snapshot(), "m") {
			t.Errorf("%+v: another one generates", c)
		}
	}
}

// watch is a fleet without members, until the test ends.
func watch(t *testing.T) *fleet.Watcher {
	t.Helper()
	w, err := fleet.Watch(fleet.WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}
