package console

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
)

// bareConsole is one of a fleet with these members and without workers of xpyd's own.
func bareConsole(t *testing.T, ids ...string) *Console {
	t.Helper()
	w, err := fleet.Watch(fleet.WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	for _, id := range ids {
		if err := w.AddStatic(fleet.Instance{ID: id, Epoch: 1, Role: fleet.Decode, URL: "http://10.0.0.1:80", Dialect: "openai", Model: "m"}, fleet.Admin); err != nil {
			t.Fatal(err)
		}
	}
	picker, log := pick.New(pick.Config{Policy: pick.RoundRobin}, nil), slog.New(slog.DiscardHandler)
	return &Console{Deps: Deps{Fleet: w, Picker: picker, Log: log, Ctx: t.Context(), Members: sense.NewMembers(sense.MembersDeps{Fleet: w, Picker: picker, Log: log, Ctx: t.Context()})}}
}

func (c *Console) asked(verb, uri, body string) *fasthttp.Response {
	var ctx fasthttp.RequestCtx
	ctx.Request.SetRequestURI(uri)
	ctx.Request.SetBodyString(body)
	c.dispatch(&ctx, "r", verb, string(ctx.Path()))
	return &ctx.Response
}

// TestDispatch: what is done, what is refused, and in which words.
func TestDispatch(t *testing.T) {
	c := bareConsole(t, "e0", "e1", "e2")
	c.Mounts = map[string]fasthttp.RequestHandler{"POST /admin/v1/scale": func(ctx *fasthttp.RequestCtx) { ctx.SetStatusCode(202) }}
	for _, x := range []struct {
		verb, uri, body string
		status          int
		says            string
	}{
		{"GET", "/nowhere", "", 404, "there is no GET /nowhere"},
		{"GET", "/admin/v1/workers", "", 404, "there is no GET /admin/v1/workers"},
		{"POST", "/admin/v1/scale", "", 202, ""},
		{"GET", "/admin/v1/scale", "", 405, "GET is not allowed here, use POST"},
		{"POST", "/admin/v1/revocations", "", 405, "POST is not allowed here, use GET"},
		{"PUT", "/admin/v1/cache/pin", "", 405, "use GET or POST or DELETE"},
		{"DELETE", "/admin/v1/instances/x", "", 404, "there is no instance \\\"x\\\""},
		{"DELETE", "/admin/v1/instances/e0", `{"forse":true}`, 400, `"param":"forse"`},
		{"DELETE", "/admin/v1/instances/e0", "", 204, ""},
		{"DELETE", "/admin/v1/instances/e0", "", 404, "there is no instance"},
		{"DELETE", "/admin/v1/instances/e1?force=true", "", 204, ""},
		{"POST", "/admin/v1/instances/x/drain", "", 404, "there is no instance"},
		{"POST", "/admin/v1/instances/e1/drain", "", 404, "there is no instance"},
		{"POST", "/admin/v1/instances/e2/drain", `{"force":1}`, 400, "force: want true or false, not 1"},
		{"POST", "/admin/v1/instances/e2/role", "", 400, "the body is empty"},
		{"POST", "/admin/v1/instances/e2/role", `{"role":"router"}`, 400, "want prefill or decode, not"},
		{"POST", "/admin/v1/instances/e2/role", `{"role":"decode"}`, 400, "only native workers change their role"},
		{"GET", "/admin/v1/revocations", "", 400, "nobody can be revoked in this fleet"},
		{"GET", "/admin/v1/cache", "", 200, "{}"},
		{"POST", "/admin/v1/cache/flush", "", 503, "no live worker of xpyd's own"},
		{"POST", "/admin/v1/cache/pin", `{"prompt":7}`, 400, "error"},
		{"GET", "/admin/v1/profile?instance=e2", "", 404, "there is no live worker"},
		{"POST", "/admin/v1/profile?seconds=x", "", 400, "seconds"},
	} {
		resp := c.asked(x.verb, x.uri, x.body)
		if body := string(resp.Body()); resp.StatusCode() != x.status || !strings.Contains(body, x.says) || strings.Contains(body, "%!") {
			t.Errorf("%s %s %s: %d %.300s", x.verb, x.uri, x.body, resp.StatusCode(), body)
		}
		if allow := string(resp.Header.Peek("Allow")); (allow != "") != (x.status == 405) {
			t.Errorf("%s %s allows %q", x.verb, x.uri, allow)
		}
		if again := string(resp.Header.Peek("Retry-After")); (again != "") != (x.status == 503) {
			t.Errorf("%s %s: again after %q", x.verb, x.uri, again)
		}
	}
	for _, id := range []string{"e0", "e1"} {
		if m := c.Fleet.Snapshot().Get(id); m != nil && m.State != fleet.Gone {
			t.Errorf("%s is %s", id, m.State)
		}
	}
	for _, x := range []struct {
		order, body string
		want        bool
	}{{"undrain", "", false}, {"drain", "", true}, {"drain", `{"wait_only":true}`, true}, {"undrain", "", false}, {"undrain", "{}", false}} {
		resp := c.asked("POST", "/admin/v1/instances/e2/"+x.order, x.body)
		if m := c.Fleet.Snapshot().Get("e2"); resp.StatusCode() != 200 || !strings.Contains(string(resp.Body()), `"id":"e2"`) || c.Members.Drained(m) != x.want {
			t.Errorf("%s: %d %s, drained %t", x.order, resp.StatusCode(), resp.Body(), c.Members.Drained(m))
		}
	}
}

// passes has every probe pass.
type passes struct{}

func (passes) Try(*sense.Pair, string, string) error { return nil }

// TestLast: the last worker of a model is not taken away unless that is forced.
func TestLast(t *testing.T) {
	c := bareConsole(t, "e0", "e1")
	silent := &http.Client{Transport: http.NewFileTransport(http.Dir(t.TempDir()))}
	c.Members = sense.NewMembers(sense.MembersDeps{Fleet: c.Fleet, Picker: c.Picker, Log: c.Log, Ctx: t.Context(), HTTP: silent, Judge: time.Hour,
		Spawn: func(f func()) bool { go f(); return true }})
	c.Members.Start(passes{})
	for served := 0; served < 2; {
		more := c.Members.Probed()
		served = 0
		for _, id := range []string{"e0", "e1"} {
			if c.Members.Serves(c.Fleet.Snapshot().Get(id)) {
				served++
			}
		}
		if served < 2 {
			<-more
		}
	}
	for _, x := range []struct {
		verb, path, body string
		status           int
	}{
		{"POST", "e0/drain", "", 200}, {"POST", "e1/drain", "", 409}, {"DELETE", "e1", "", 409}, {"DELETE", "e1", `{"force":false}`, 409}, {"POST", "e0/undrain", "", 200},
		{"POST", "e1/drain", "", 200}, {"POST", "e1/undrain", "", 200}, {"DELETE", "e0", "", 204}, {"DELETE", "e1", "", 409}, {"POST", "e1/drain", "{}", 409},
		{"POST", "e1/drain", `{"force":true}`, 200}, {"POST", "e1/undrain", "", 200}, {"DELETE", "e1", `{"force":true}`, 204},
	} {
		resp := c.asked(x.verb, "/admin/v1/instances/"+x.path, x.body)
		if body := string(resp.Body()); resp.StatusCode() != x.status || x.status == 409 && !strings.Contains(body, "e1 is the last decode worker that serves m") {
			t.Errorf("%s %s %s: %d %s", x.verb, x.path, x.body, resp.StatusCode(), body)
		}
	}
}

// TestOwn: whom the console asks.
func TestOwn(t *testing.T) {
	member := func(state fleet.State, dialect string) *fleet.Member {
		return &fleet.Member{State: state, Instance: fleet.Instance{Dialect: dialect}}
	}
	for m, want := range map[*fleet.Member]bool{nil: false, member(fleet.Live, fleet.Native): true, member(fleet.Live, "vllm"): false, member(fleet.Dead, fleet.Native): false, member(fleet.Gone, fleet.Native): false} {
		if own(m) != want {
			t.Errorf("%+v: %t", m, !want)
		}
	}
}

// TestCombine: one status for several workers' answers, as the comment there has it.
func TestCombine(t *testing.T) {
	for _, x := range []struct {
		want     int
		statuses []int
	}{
		{200, []int{200}}, {200, []int{200, 201, 204}}, {200, []int{200, 404}}, {200, []int{409, 200, 404}},
		{404, []int{404}}, {503, []int{503, 503}}, {404, []int{404, 400}}, {409, []int{404, 409}}, {499, []int{400, 499}},
		{502, []int{200, 400}}, {502, []int{200, 503}}, {502, []int{404, 503}}, {502, []int{500, 503}}, {502, []int{404, 200, 500}}, {502, []int{400, 500}},
	} {
		if got := combine(x.statuses); got != x.want {
			t.Errorf("%v: %d, want %d", x.statuses, got, x.want)
		}
	}
}

// odd is nothing that JSON can say.
type odd struct{}

func (*odd) UnmarshalJSON([]byte) error { return errors.New("it is odd") }

// TestReadBody: what is wrong with a body is said with its key.
func TestReadBody(t *testing.T) {
	type body struct {
		On   bool              `json:"on"`
		Name string            `json:"name"`
		N    int               `json:"n"`
		F    float64           `json:"f"`
		List []string          `json:"list"`
		Map  map[string]string `json:"map"`
		Odd  odd               `json:"odd"`
	}
	for _, x := range []struct {
		in, param, says string
		needed          bool
	}{
		{"", "", "", false}, {" \n", "", "", false}, {"", "", "the body is empty", true}, {" ", "", "the body is empty", true}, {"{}", "", "", true}, {`{"on":true,"n":3,"list":["a"]}`, "", "", true},
		{"{", "", "the body is no JSON object", false}, {"null", "", "want a JSON object, not null", false}, {"[]", "", "want a JSON object, not []", false}, {"{} x", "", "the body is no JSON object", false},
		{`{"off":1}`, "off", `there is no key "off" here`, false}, {`{"on":1}`, "on", "on: want true or false, not 1", false}, {`{"name":[2]}`, "name", "name: want a string, not [2]", false}, {`{"n":1.5}`, "n", "n: want a whole number such as 3, not 1.5", false},
		{`{"f":"x"}`, "f", `f: want a number, not "x"`, false}, {`{"list":"x"}`, "list", `list: want a list, not "x"`, false}, {`{"map":2}`, "map", "map: want an object, not 2", false}, {`{"odd":2}`, "", "read the body: it is odd", false},
	} {
		var ctx fasthttp.RequestCtx
		ctx.Request.SetBodyString(x.in)
		switch err := ReadBody(&ctx, &body{}, x.needed); {
		case (err == nil) != (x.says == ""):
			t.Errorf("%q: %v", x.in, err)
		case err != nil && (err.Status != 400 || err.Param != x.param || !strings.Contains(err.Message, x.says)):
			t.Errorf("%q: %d %s, %q", x.in, err.Status, err.Param, err.Message)
		}
	}
}

// revoker revokes; err is what comes of it.
type revoker struct {
	list []fleet.Revocation
	did  string
	err  error
}

func (r *revoker) Revoke(id string) error          { r.did = "+" + id; return r.err }
func (r *revoker) Unrevoke(id string) error        { r.did = "-" + id; return r.err }
func (r *revoker) Revocations() []fleet.Revocation { return r.list }

// TestRevocations: who is shut out, and why an ID cannot be.
func TestRevocations(t *testing.T) {
	list := []fleet.Revocation{{ID: "a", At: 1e6}, {ID: "b", At: 2e6, Back: true}, {ID: "e0", At: 3e6}}
	for _, x := range []struct {
		verb, id string
		err      error
		did      string
		status   int
		says     string
	}{
		{"GET", "", nil, "", 200, `{"revoked":[{"id":"a","since":"1970-01-01T00:00:01Z"},{"id":"e0","since":"1970-01-01T00:00:03Z"}]}`},
		{"POST", "/a", nil, "+a", 200, `no worker of this name is known`},
		{"POST", "/e0", nil, "+e0", 200, `"revoked":[{"id":"a"`},
		{"DELETE", "/a", nil, "-a", 200, `"revoked":[{"id":"a"`},
		{"DELETE", "/b", fmt.Errorf("x: %w", fleet.ErrNotRevoked), "-b", 404, "b: x: it is not revoked"},
		{"POST", "/c", fleet.ErrManyRevoked, "+c", 409, `"code":"too_many_revoked"`},
		{"POST", "/a!", errors.New("no id"), "+a!", 400, `"param":"id"`},
		{"POST", "/c", errors.New("not saved"), "+c", 500, "not saved"},
		{"POST", "/fleet-secret-0123", nil, "", 400, "xpyd secret rotate"},
	} {
		c, r := bareConsole(t, "e0"), &revoker{list: list, err: x.err}
		c.Revoker = r
		resp := c.asked(x.verb, "/admin/v1/revocations"+x.id, "")
		if body := string(resp.Body()); resp.StatusCode() != x.status || !strings.Contains(body, x.says) || r.did != x.did {
			t.Errorf("%s %s: %d %s, did %q", x.verb, x.id, resp.StatusCode(), body, r.did)
		}
	}
	c := bareConsole(t, "e0")
	c.Revoker = &revoker{list: list}
	for id, want := range map[string]string{"a": "revoked", "b": "not revoked", "e0": "revoked", "x": "not revoked"} {
		if got := c.standing(id); got != want {
			t.Errorf("%s is %q", id, got)
		}
	}
}
