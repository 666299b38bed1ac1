package sense

import (
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// says is an engine that answers what it has for a path; asked is called before.
type says struct {
	answers map[string]string
	asked   func()
}

func (s says) RoundTrip(req *http.Request) (*http.Response, error) {
	s.asked()
	body, ok := s.answers[req.URL.Path]
	resp := &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(body)), Header: http.Header{}, Request: req}
	if !ok {
		resp.StatusCode = 404
	}
	return resp, nil
}

// TestLearn: what an engine says of itself is known before its probe, and only what can be believed; an
// engine of another model is refused.
func TestLearn(t *testing.T) {
	const models, version, events = `{"data":[{"id":"m","max_model_len":99},{"id":"n"}]}`, `{"version":"1.2"}`, `{"version":"1.2","kv_events":{"endpoint_host":"*","endpoint_port_base":5557}}`
	type answers = map[string]string
	for name, c := range map[string]struct {
		engine     answers
		edit       func(*fleet.Instance)
		configured string // the version of its static entry
		source     fleet.Source
		leaves     bool // while it is asked
		changed    bool
		err        string
		want       func(*fleet.Instance) bool
	}{
		"all":                   {engine: answers{"/v1/models": models, "/version": version}, changed: true, want: func(i *fleet.Instance) bool { return i.Version == "1.2" && i.MaxModelLen == 99 }},
		"its second model":      {engine: answers{"/v1/models": `{"data":[{"id":"n"},{"id":"m"}]}`}},
		"another model":         {engine: answers{"/v1/models": `{"data":[{"id":"n"}]}`, "/version": version}, err: `d0 serves "n", not "m"`},
		"nothing":               {},
		"no models":             {engine: answers{"/version": version}, changed: true, want: func(i *fleet.Instance) bool { return i.Version == "1.2" }},
		"an empty version":      {engine: answers{"/version": `{"version":""}`}, edit: func(i *fleet.Instance) { i.Version = "0" }, want: func(i *fleet.Instance) bool { return i.Version == "0" }},
		"a later version":       {engine: answers{"/version": version}, edit: func(i *fleet.Instance) { i.Version = "0" }, changed: true, want: func(i *fleet.Instance) bool { return i.Version == "1.2" }},
		"the configured one":    {engine: answers{"/version": version}, edit: func(i *fleet.Instance) { i.Version = "0" }, configured: "0", want: func(i *fleet.Instance) bool { return i.Version == "0" }},
		"a slash behind":        {engine: answers{"/version": version}, edit: func(i *fleet.Instance) { i.URL += "/" }, changed: true},
		"its host":              {engine: answers{"/server_info": events}, changed: true, want: func(i *fleet.Instance) bool { return i.KVEvents == "10.0.0.1:5557" }},
		"no port":               {engine: answers{"/v1/models": models, "/server_info": events}, edit: func(i *fleet.Instance) { i.URL = "http://10.0.0.1" }, want: func(i *fleet.Instance) bool { return i.Version == "" && i.KVEvents == "" }},
		"an address of nothing": {engine: answers{"/server_info": strings.Replace(events, "*", `a\u0007`, 1)}, want: func(i *fleet.Instance) bool { return i.Version == "" && i.KVEvents == "" }},
		"leaves":                {engine: answers{"/version": version}, leaves: true, changed: true},
		"announces itself":      {engine: answers{"/v1/models": `{"data":[{"id":"n"}]}`}, source: fleet.NATS},
		"typed":                 {engine: answers{"/v1/models": `{"data":[{"id":"n"}]}`}, edit: func(i *fleet.Instance) { i.Dialect = fleet.Native }},
		"of no dialect":         {engine: answers{"/v1/models": `{"data":[{"id":"n"}]}`}, edit: func(i *fleet.Instance) { i.Dialect = "x" }},
	} {
		t.Run(name, func(t *testing.T) {
			w := watch(t)
			inst := fleet.Instance{ID: "d0", Epoch: 1, Role: fleet.Decode, URL: "http://10.0.0.1:80", Dialect: "sglang", Model: "m"}
			if c.edit != nil {
				c.edit(&inst)
			}
			if err := w.AddStatic(inst, fleet.Static); err != nil {
				t.Fatal(err)
			}
			m := *w.Snapshot().Get("d0")
			if c.source != "" {
				m.Source = c.source
			}
			var log strings.Builder
			ms := NewMembers(MembersDeps{Fleet: w, Picker: pick.New(pick.Config{Policy: pick.RoundRobin}, nil), Log: slog.New(slog.NewTextHandler(&log, nil)), Ctx: t.Context(),
				HTTP: &http.Client{Transport: says{c.engine, func() {
					if c.leaves {
						w.Remove("d0", "leaves")
					}
				}}}})
			ms.statics = map[string]Static{"d0": {Version: c.configured}}
			alone := Pair{Prefill: &m, Decode: &m}
			changed, err := ms.learn(alone)
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) || changed != c.changed {
				t.Errorf("changed %t, %v", changed, err)
			}
			got := w.Snapshot().Get("d0").Instance
			if c.want == nil && !c.changed && !got.Equal(&inst) || c.want != nil && !c.want(&got) {
				t.Errorf("it is %+v", got)
			}
			if said := strings.Contains(log.String(), "engine found"); said != (c.changed && !c.leaves) {
				t.Errorf("said %t: %s", said, log.String())
			}
			if failed := strings.Contains(log.String(), "note what an engine is"); failed != (name == "an address of nothing") {
				t.Errorf("cannot be noted %t: %s", failed, log.String())
			}
		})
	}
}
