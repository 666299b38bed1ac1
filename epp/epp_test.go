package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// engine is the metrics of one.
type engine struct {
	addr    string
	down    atomic.Bool
	running atomic.Int64
}

func newEngine(t testing.TB) *engine {
	t.Helper()
	e := &engine{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if e.down.Load() || q.URL.Path != "/metrics" {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, "# HELP x\nvllm:num_requests_running{engine=\"0\",model_name=\"m\"} %d.0\nvllm:num_requests_waiting{engine=\"0\"} 0\n", e.running.Load())
	}))
	t.Cleanup(s.Close)
	e.addr = strings.TrimPrefix(s.URL, "http://")
	return e
}

// epp is one that runs, and a client of it.
type epp struct {
	file   string
	client extproc.ExternalProcessorClient
	health healthpb.HealthClient
}

func start(t testing.TB, entries ...string) *epp {
	t.Helper()
	e := &epp{file: filepath.Join(t.TempDir(), "endpoints.yaml")}
	e.write(t, entries...)
	ln := bufconn.Listen(1 << 20)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- serve(ctx, ln, e.file, 50*time.Millisecond, pick.DefaultConfig(), slog.New(slog.DiscardHandler))
	}()
	conn, err := grpc.NewClient("passthrough:epp", grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return ln.DialContext(ctx) }), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		conn.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	e.client, e.health = extproc.NewExternalProcessorClient(conn), healthpb.NewHealthClient(conn)
	return e
}

func (e *epp) write(t testing.TB, entries ...string) {
	t.Helper()
	text := "endpoints:\n"
	for _, entry := range entries {
		text += "  - {" + entry + "}\n"
	}
	fresh := e.file + ".new"
	if err := os.WriteFile(fresh, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(fresh, e.file); err != nil {
		t.Fatal(err)
	}
}

func (e *epp) wait(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); {
		if time.Now().After(end) {
			t.Fatal("never: " + what)
		}
		time.Sleep(10 * time.Millisecond) // between looks, for a state that others bring about
	}
}

func (e *epp) serving(t testing.TB) bool {
	r, err := e.health.Check(t.Context(), &healthpb.HealthCheckRequest{})
	return err == nil && r.Status == healthpb.HealthCheckResponse_SERVING
}

// routed is what became of a request.
type routed struct {
	decode, prefill, metadata string
	removed                   []string
	status                    int
	body                      string // what goes on to decode, or the answer in its place
}

// open replays one request as Envoy sends it, and leaves the stream open.
func (e *epp) open(t testing.TB, body string, subset ...string) (extproc.ExternalProcessor_ProcessClient, routed) {
	t.Helper()
	stream, err := e.client.Process(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	headers := &extproc.ProcessingRequest{
		ProtocolConfig: &extproc.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, ResponseBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED},
		Request:        &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{EndOfStream: body == ""}},
	}
	if subset != nil {
		var list []any
		for _, s := range subset {
			list = append(list, s)
		}
		fields, err := structpb.NewStruct(map[string]any{keySubset: list})
		if err != nil {
			t.Fatal(err)
		}
		headers.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{metadataSubset: fields}}
	}
	send(t, stream, headers)
	for rest := body; rest != ""; {
		n := min(len(rest), 40_000)
		send(t, stream, &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: []byte(rest[:n]), EndOfStream: n == len(rest)}}})
		rest = rest[n:]
	}
	var r routed
	for {
		out, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		switch v := out.Response.(type) {
		case *extproc.ProcessingResponse_ImmediateResponse:
			r.status, r.body = int(v.ImmediateResponse.Status.Code), string(v.ImmediateResponse.Body)
			return stream, r
		case *extproc.ProcessingResponse_RequestHeaders:
			m := v.RequestHeaders.Response.HeaderMutation
			for _, h := range m.SetHeaders {
				switch h.Header.Key {
				case headerDestination:
					r.decode = string(h.Header.RawValue)
				case headerPrefiller:
					r.prefill = string(h.Header.RawValue)
				}
			}
			r.removed = m.RemoveHeaders
			r.metadata = out.DynamicMetadata.GetFields()[metadataOut].GetStructValue().GetFields()[headerDestination].GetStringValue()
			if body == "" {
				return stream, r
			}
		case *extproc.ProcessingResponse_RequestBody:
			part := v.RequestBody.Response.BodyMutation.GetStreamedResponse()
			if len(part.Body) > 64<<10 {
				t.Errorf("a piece of %d bytes", len(part.Body))
			}
			r.body += string(part.Body)
			if part.EndOfStream {
				return stream, r
			}
		}
	}
}

func send(t testing.TB, stream extproc.ExternalProcessor_ProcessClient, in *extproc.ProcessingRequest) {
	t.Helper()
	if err := stream.Send(in); err != nil {
		t.Fatal(err)
	}
}

// finish replays the answer, and waits until the exchange is over.
func finish(t testing.TB, stream extproc.ExternalProcessor_ProcessClient, status string) {
	t.Helper()
	send(t, stream, &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extproc.HttpHeaders{Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{{Key: ":status", RawValue: []byte(status)}}}}}})
	send(t, stream, &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{Body: []byte("data: [DONE]\n\n"), EndOfStream: true}}})
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	echoed := ""
	for {
		out, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		echoed += string(out.GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse().GetBody())
	}
	if echoed != "data: [DONE]\n\n" {
		t.Errorf("the answer became %q", echoed)
	}
}

func prompt(text string) string {
	b, _ := json.Marshal(map[string]any{"model": "m", "prompt": text, "max_tokens": 16})
	return string(b)
}

// TestPairs: a request gets a pair, its body passes as it is, the same prefix goes where it is warm, and
// another to the other pair while the first is busy.
func TestPairs(t *testing.T) {
	p0, p1, d0, d1 := newEngine(t), newEngine(t), newEngine(t), newEngine(t)
	e := start(t, "address: "+p0.addr+", role: prefill, model: m", "address: "+p1.addr+", role: prefill, model: m",
		"address: "+d0.addr+", role: decode, model: m", "address: "+d1.addr+", role: decode, model: m")
	e.wait(t, "serving", func() bool { return e.serving(t) })
	long := prompt(strings.Repeat("once upon a time ", 20_000))
	stream, first := e.open(t, long)
	if first.body != long || first.decode == "" || first.metadata != first.decode || (first.prefill != p0.addr && first.prefill != p1.addr) || (first.decode != d0.addr && first.decode != d1.addr) {
		t.Fatalf("decode %q, prefill %q, metadata %q, %d bytes of %d", first.decode, first.prefill, first.metadata, len(first.body), len(long))
	}
	busy, other := e.open(t, prompt(strings.Repeat("something else ", 20_000)))
	if other.prefill == first.prefill || other.decode == first.decode {
		t.Errorf("%+v goes where %+v is under way", other.decode+" "+other.prefill, first.decode+" "+first.prefill)
	}
	finish(t, stream, "200")
	finish(t, busy, "200")
	for range 4 {
		again, r := e.open(t, long)
		if r.prefill != first.prefill || r.decode != first.decode {
			t.Errorf("a warm prefix went to %s and %s, not to %s and %s", r.prefill, r.decode, first.prefill, first.decode)
		}
		finish(t, again, "200")
	}
}

// TestSubset: only what Envoy allows is chosen, and nothing if that is nobody.
func TestSubset(t *testing.T) {
	p, d0, d1 := newEngine(t), newEngine(t), newEngine(t)
	e := start(t, "address: "+p.addr+", role: prefill, model: m", "address: "+d0.addr+", role: decode, model: m", "address: "+d1.addr+", role: decode, model: m")
	e.wait(t, "serving", func() bool { return e.serving(t) })
	for range 8 {
		stream, r := e.open(t, prompt("hi"), p.addr, d1.addr)
		if r.decode != d1.addr {
			t.Errorf("%s is not in the subset", r.decode)
		}
		finish(t, stream, "200")
	}
	if _, r := e.open(t, prompt("hi"), p.addr, "192.0.2.1:80"); r.status != 503 {
		t.Errorf("status %d, decode %q", r.status, r.decode)
	}
}

// TestAlone: an engine that does both gets no prefiller, and a client's own header goes.
func TestAlone(t *testing.T) {
	b := newEngine(t)
	e := start(t, "address: "+b.addr+", role: both, model: m")
	e.wait(t, "serving", func() bool { return e.serving(t) })
	for _, body := range []string{prompt("hi"), ""} {
		_, r := e.open(t, body)
		if r.decode != b.addr || r.prefill != "" || len(r.removed) != 1 || r.removed[0] != headerPrefiller {
			t.Errorf("%q: %+v", body, r)
		}
	}
}

// TestRefused: what is answered in place of an engine, in OpenAI's shape.
func TestRefused(t *testing.T) {
	p, d := newEngine(t), newEngine(t)
	e := start(t, "address: "+p.addr+", role: prefill, model: m", "address: "+d.addr+", role: decode, model: m")
	e.wait(t, "serving", func() bool { return e.serving(t) })
	f := func(body string, status int) {
		t.Helper()
		_, r := e.open(t, body)
		var said struct{ Error struct{ Message string } }
		if err := json.Unmarshal([]byte(r.body), &said); r.status != status || err != nil || said.Error.Message == "" {
			t.Errorf("%.40q: status %d, %s", body, r.status, r.body)
		}
	}
	f(`{"model":`, 400)
	f(`{"model":7,"prompt":"x"}`, 400)
	f(`{"model":"other","prompt":"x"}`, 404)
	p.down.Store(true)
	e.wait(t, "not serving", func() bool { return !e.serving(t) })
	f(prompt("x"), 503)
	p.down.Store(false)
	e.wait(t, "serving again", func() bool { return e.serving(t) })
	e.write(t, "address: "+d.addr+", role: decode, model: m")
	e.wait(t, "not serving with the new file", func() bool { return !e.serving(t) })
}

// TestOthers: requests that others sent count, by the engines' metrics.
func TestOthers(t *testing.T) {
	p, d0, d1 := newEngine(t), newEngine(t), newEngine(t)
	d0.running.Store(50)
	e := start(t, "address: "+p.addr+", role: prefill, model: m", "address: "+d0.addr+", role: decode, model: m", "address: "+d1.addr+", role: decode, model: m")
	e.wait(t, "serving", func() bool { return e.serving(t) })
	for i := range 8 {
		_, r := e.open(t, prompt(fmt.Sprint("prompt ", i)))
		if r.decode != d1.addr {
			t.Errorf("request %d goes where 50 run", i)
		}
	}
}

func TestParseEndpoints(t *testing.T) {
	f := func(text, wrong string) {
		t.Helper()
		_, err := parseEndpoints([]byte(text))
		if wrong == "" && err != nil || wrong != "" && (err == nil || !strings.Contains(err.Error(), wrong)) {
			t.Errorf("%q: %v, want %q", text, err, wrong)
		}
	}
	f("", "")
	f("endpoints: [{address: '10.0.0.1:80', role: both, model: m}, {address: '[::1]:80', role: decode, model: m}]", "")
	f("endpoints: [{address: host:80, role: both, model: m}]", "endpoints[0].address")
	f("endpoints: [{address: '10.0.0.1:80', role: all, model: m}]", "endpoints[0].role")
	f("endpoints: [{address: '10.0.0.1:80', role: both}]", "endpoints[0].model")
	f("endpoints: [{address: '10.0.0.1:80', role: both, model: m}, {address: '10.0.0.1:80', role: both, model: m}]", "twice")
	f("endpoint: []", "endpoint")
}

func TestParseMetrics(t *testing.T) {
	f := func(text string, want fleet.Load, fails bool) {
		t.Helper()
		got, err := parseMetrics(strings.NewReader(text))
		if (err != nil) != fails || !fails && got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	f("", fleet.Load{}, false)
	f("vllm:num_requests_running{a=\"}\"} 3.0\nvllm:num_requests_running{a=\"b c\"} 2 1700000000\nvllm:num_requests_waiting 4\n", fleet.Load{Running: 5, Waiting: 4}, false)
	f("sglang:num_running_reqs 1\nsglang:num_queue_reqs 2\nvllm:num_requests_running_total 9\n", fleet.Load{Running: 1, Waiting: 2}, false)
	f("vllm:num_requests_running{ 3\n", fleet.Load{}, false)
	f("vllm:num_requests_running -1\n", fleet.Load{}, true)
	f("vllm:num_requests_running NaN\n", fleet.Load{}, true)
	f("vllm:num_requests_running\n", fleet.Load{}, true)
}

// FuzzParseMetrics: whatever engines say, counts are sane.
func FuzzParseMetrics(f *testing.F) {
	f.Add("vllm:num_requests_running{a=\"b\"} 3\n")
	f.Add("sglang:num_queue_reqs 1e5\n{} {}\n")
	f.Fuzz(func(t *testing.T, text string) {
		if load, err := parseMetrics(strings.NewReader(text)); err == nil && (load.Running < 0 || load.Waiting < 0) {
			t.Errorf("%+v", load)
		}
	})
}
